"""Generating text: the inference state, the loop, and CUDA graphs of its steps."""

import operator
import time
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from mamba_ssm.utils.sampling import (
    check_sampling,
    modify_logit_for_repetition_penalty,
    modify_logits_for_min_p_filtering,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)

__all__ = [
    "DecodingCGCache",
    "GenerationMixin",
    "GenerationOutput",
    "InferenceParams",
    "capture_graph",
    "decode",
    "modify_logit_for_repetition_penalty",
    "modify_logits_for_min_p_filtering",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
    "update_graph_cache",
]


class GenerationOutput(typing.NamedTuple):
    """What decode returns."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None


class Streamer(typing.Protocol):
    """What is told of each token as it comes: transformers' streamers and whatever has these two."""

    def put(self, value: torch.Tensor, /) -> object: ...
    def end(self) -> object: ...


@dataclass
class InferenceParams:
    """What the layers of a model keep between calls.

    max_seqlen: tokens that the cache of an attention layer holds. max_batch_size: rows.
    seqlen_offset: tokens that went in before this call; 0: the call fills the states.
    batch_size_offset: upstream's; not used.
    key_value_memory_dict: {layer index: its states}, made by the layers at the first call where they are missing.
    lengths_per_sample: (B) int32 or None; where given, attention takes a step's position from it, row by row.

    Same as upstream's mamba_ssm.utils.generation.InferenceParams.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Ready for new sequences; the states stay allocated, the next first call overwrites them."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


# ---- the loop --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def decode(
    input_ids: torch.Tensor,
    model: nn.Module,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
    teacher_outputs: torch.Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Streamer | None = None,
) -> GenerationOutput:
    """Continues input_ids (B, L) up to max_length tokens, the prompt included.

    Args:
        model: called as model(input_ids, position_ids=, inference_params=, num_last_tokens=1).logits. If it has a
            vocab_size, tokens given must be below it.
        top_k, top_p, min_p, temperature: see sample. repetition_penalty: on every earlier token; 1: off.
        eos_token_id: one token or several; a row that draws one goes on with the first of them; the loop ends when
            every row has.
        teacher_outputs: (B, length); its tokens are taken instead of drawn ones as far as it reaches.
        vocab_size: logits beyond it, those of a padded vocabulary, are left out.
        cg: run the steps as a CUDA graph, kept in model._decoding_cache for further calls. Hooks' Python runs when it
            is captured, not at each step; after a switch inside a module (an adapter turned off) set that to None. A
            model that is not on a GPU decodes without, and a warning says so.
        enable_timing: print the time of the whole call. output_scores: keep the logits of each new token.
        streamer: put(tokens on the CPU) is called with the prompt and each step's tokens (B), then end().

    Returns:
        GenerationOutput: sequences (B, length), scores: a tuple of (B, vocabulary) before penalty and filters, or None.

    Raises:
        ValueError: an argument is out of its range.

    Same as upstream's mamba_ssm.utils.generation.decode, which returns transformers' classes with these fields.
    """
    check_sampling(top_k, top_p, min_p, temperature, repetition_penalty)
    input_ids = _check_tokens("input_ids", input_ids, model)
    max_length = _positive("max_length", max_length)
    vocab_size = None if vocab_size is None else _positive("vocab_size", vocab_size)
    if max_length <= input_ids.shape[1]:
        raise ValueError(
            f"generate: max_length counts the prompt too and must exceed its {input_ids.shape[1]} tokens, got "
            f"{max_length}"
        )
    if teacher_outputs is not None:
        teacher_outputs = _check_tokens("teacher_outputs", teacher_outputs, model)
        if teacher_outputs.shape[0] != input_ids.shape[0]:
            raise ValueError(
                f"generate: teacher_outputs must have input_ids' {input_ids.shape[0]} rows, got "
                f"{teacher_outputs.shape[0]}"
            )
    device = next(model.parameters()).device
    batch, prompt = input_ids.shape
    if cg and device.type != "cuda":
        message = f"generate: cg=True needs the model on a CUDA device, it is on {device}: decoding without CUDA graphs"
        warnings.warn(message, stacklevel=4)  # the caller of generate, beyond inference_mode's wrapper
        cg = False
    cache = None
    if cg:
        cache = update_graph_cache(model, getattr(model, "_decoding_cache", None), batch, prompt, max_length)
        model._decoding_cache = cache  # type: ignore[assignment]  # a module takes any attribute
        inference_params = cache.inference_params
        inference_params.reset(max_length, batch)
        cache.select(batch)
    else:
        inference_params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    timer = _Timer(device) if enable_timing else None
    if streamer is not None:
        streamer.put(input_ids.cpu())
    sequences = input_ids.new_empty(batch, max_length)
    sequences[:, :prompt] = input_ids
    position_ids = torch.empty(batch, 1, dtype=torch.long, device=input_ids.device)
    scores, end, tokens = [], prompt, input_ids
    ended = None
    if eos_token_id is not None:
        eos = _eos_tokens(eos_token_id, input_ids.device)
        ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    while end < max_length:
        offset = inference_params.seqlen_offset
        if offset == 0:
            logits = model(tokens, position_ids=None, inference_params=inference_params, num_last_tokens=1).logits
        elif cache is not None:
            logits = cache.run(tokens, position_ids.fill_(offset), offset)
        else:
            logits = model(
                tokens, position_ids=position_ids.fill_(offset), inference_params=inference_params, num_last_tokens=1
            ).logits
        logits = logits.squeeze(1)
        inference_params.seqlen_offset = end
        if output_scores:
            scores.append(logits[:, :vocab_size])
        if teacher_outputs is not None and end < teacher_outputs.shape[1]:
            token = teacher_outputs[:, end]
        else:
            if repetition_penalty != 1.0:  # before the vocabulary is cut: the prompt may hold any token
                logits = modify_logit_for_repetition_penalty(logits.clone(), sequences[:, :end], repetition_penalty)
            token = sample(logits[:, :vocab_size], top_k, top_p, min_p, temperature)
            if ended is not None:
                token = torch.where(ended, eos[0], token)
        sequences[:, end] = token
        tokens = token.unsqueeze(1)
        end += 1
        if streamer is not None:
            streamer.put(token.cpu())
        if ended is not None:
            ended |= torch.isin(token, eos)
            if ended.all():
                break
    if streamer is not None:
        streamer.end()
    if timer is not None:
        print(f"Prompt processing + decoding time: {timer.milliseconds():.0f}ms")
    return GenerationOutput(sequences[:, :end], tuple(scores) if output_scores else None)


def _check_tokens(name: str, tokens: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """tokens as int64; out of the vocabulary they would stop a CUDA device for good."""
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"generate: {name} must be an int64 tensor (B, L), got {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"generate: {name} must be int64 (B, L) with at least one token, got "
            f"{str(tokens.dtype).removeprefix('torch.')} {tuple(tokens.shape)}"
        )
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None and tokens.numel():
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"generate: {name} must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}")
    return tokens.long()


def _positive(name: str, value: object) -> int:
    """A positive integer, numpy's and torch's among them, as int."""
    number = operator.index(value) if hasattr(value, "__index__") else 0
    if number < 1:
        raise ValueError(f"generate: {name} must be a positive integer, got {value!r}")
    return number


def _eos_tokens(eos_token_id: object, device: torch.device) -> torch.Tensor:
    """eos_token_id, an integer, a list or a tensor of them, as int64 (tokens)."""
    try:
        eos = torch.as_tensor(eos_token_id).flatten()
    except (TypeError, ValueError, RuntimeError):  # what torch makes no tensor of: words, None in a list, huge numbers
        eos = torch.empty(0)
    if eos.numel() == 0 or eos.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"generate: eos_token_id must be one or several integers, got {eos_token_id!r}")
    return eos.to(device, torch.int64)


class _Timer:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def milliseconds(self) -> float:
        return (self._now() - self.start) * 1e3


class GenerationMixin:
    """generate() for a model with allocate_inference_cache and the forward that decode calls."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: typing.Any
    ) -> dict[int, typing.Any]:
        raise NotImplementedError(f"{type(self).__name__} must define allocate_inference_cache to generate")

    def generate(
        self,
        input_ids: torch.Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: typing.Any,
    ) -> torch.Tensor | GenerationOutput:
        """Continues input_ids (B, L) int64 up to max_length tokens, the prompt included; greedy unless top_k is set.

        Returns sequences (B, length), or with return_dict_in_generate a GenerationOutput(sequences, scores). The other
        arguments are decode's: repetition_penalty, eos_token_id, teacher_outputs, vocab_size, cg, enable_timing,
        streamer.
        """
        output = decode(
            input_ids,
            typing.cast(nn.Module, self),
            max_length,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            temperature=temperature,
            output_scores=output_scores,
            **kwargs,
        )
        return output if return_dict_in_generate else output.sequences


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


Step: typing.TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class DecodingCGCache:
    """The states of up to max_batch_size rows, and a captured step for each batch size met.

    Graphs of smaller batches use the first rows of the same states, so changing the batch costs one capture, once.
    """

    def __init__(self, model: nn.Module, max_batch_size: int, max_seqlen: int, dtype: torch.dtype | None) -> None:
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.key = _key(model, dtype)
        device = next(model.parameters()).device
        allocate: typing.Any = model.allocate_inference_cache
        self.states: dict[int, typing.Any] = allocate(max_batch_size, max_seqlen, dtype=dtype)
        self.lengths = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self.inference_params = InferenceParams(max_seqlen=max_seqlen, max_batch_size=max_batch_size)
        self.mempool = torch.cuda.graph_pool_handle()
        self.callables: dict[int, Step] = {}
        self.run: typing.Any = None  # the selected batch's of these

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, in copies and pickles of a model that holds this: a CUDA graph can be neither copied nor saved."""
        return type(None), ()

    def select(self, batch: int) -> None:
        """Points inference_params at a batch's rows, and run at its captured step."""
        self.inference_params.key_value_memory_dict = {
            layer: tuple(None if state is None else state[:batch] for state in states)
            for layer, states in self.states.items()
        }
        self.inference_params.lengths_per_sample = self.lengths[:batch]
        self.run = self.callables.get(batch)


def _key(model: nn.Module, dtype: torch.dtype | None) -> tuple[typing.Any, ...]:
    """What a captured graph depends on: it reads parameters where they lay and holds what modules and hooks did."""
    parameters = tuple((tensor.data_ptr(), tensor.dtype) for tensor in model.parameters())
    modules = tuple((type(m), *m._forward_pre_hooks, *m._forward_hooks) for m in model.modules())  # hooks by number
    return dtype, parameters, modules


@torch.inference_mode()
def update_graph_cache(
    model: nn.Module,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Sequence[int] = (1,),
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """A DecodingCGCache that serves this batch size and length: cache itself if it does, else a new one.

    Args:
        cache: an earlier result or None. seqlen_og: length of the prompt. decoding_seqlens: (1,), the tokens of a step.
        dtype: of the states, None: each layer's own.
        n_warmups: steps run before the capture, so that libraries allocate what they need.

    Raises:
        RuntimeError: the model is not on a GPU. ValueError: decoding_seqlens is not (1,).

    Same as upstream's mamba_ssm.utils.generation.update_graph_cache.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(f"generate: cg=True needs the model on a CUDA device, it is on {device}; use cg=False")
    if tuple(decoding_seqlens) != (1,):
        raise ValueError(f"update_graph_cache: a step decodes one token, decoding_seqlens=(1,), got {decoding_seqlens}")
    if cache is None or cache.key != _key(model, dtype) or cache.max_batch_size < batch_size:
        cache = DecodingCGCache(model, batch_size, max_seqlen, dtype)
    elif cache.max_seqlen < max_seqlen:
        cache = DecodingCGCache(model, cache.max_batch_size, max_seqlen, dtype)
    if batch_size not in cache.callables:
        cache.inference_params.reset(cache.max_seqlen, batch_size)
        cache.select(batch_size)
        arguments = model, cache.inference_params, batch_size, cache.max_seqlen, 1, cache.mempool, n_warmups
        cache.callables[batch_size] = capture_graph(*arguments)
    return cache


def capture_graph(
    model: nn.Module,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: typing.Any = None,
    n_warmups: int = 2,
) -> Step:
    """Captures a step of the model, on a GPU, as a CUDA graph: run(input_ids (B, 1), position_ids (B, 1), offset) ->
    logits. inference_params holds the states that it reads and writes, and lengths_per_sample (B) int32; these may not
    be replaced. update_graph_cache makes all of this.

    Same as upstream's mamba_ssm.utils.generation.capture_graph.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(f"capture_graph needs the model on a CUDA device, it is on {device}")
    lengths = inference_params.lengths_per_sample
    if lengths is None or decoding_seqlen != 1:
        raise ValueError(
            "capture_graph needs inference_params.lengths_per_sample, a tensor, and decoding_seqlen=1, got "
            f"{type(lengths).__name__} and {decoding_seqlen}"
        )
    input_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    position_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    before = inference_params.seqlen_offset
    # any position that is not the first; the true one is read from lengths
    inference_params.seqlen_offset = offset = max_seqlen - 1
    lengths.fill_(offset)

    def step() -> torch.Tensor:
        return model(input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=1).logits

    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(n_warmups):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=mempool):
            logits = step()
    inference_params.seqlen_offset = before

    def run(new_input_ids: torch.Tensor, new_position_ids: torch.Tensor, seqlen: int) -> torch.Tensor:
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        lengths.fill_(seqlen)
        graph.replay()
        return logits.clone()

    return run
