"""Generating text: the loop and its options."""

import difflib
import inspect
import operator
import sys
import time
import typing
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn

from mamba_ssm._torch import is_bare
from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear
from mamba_ssm.utils._graphs import (
    DecodingCGCache,
    GreedySteps,
    cache_for,
    capture_graph,
    greedy_steps,
    update_graph_cache,
)
from mamba_ssm.utils._inference_params import InferenceParams
from mamba_ssm.utils._prompts import prompts_of
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
    """Gets each token as soon as it is there: transformers' streamers, and any object with these two methods."""

    def put(self, value: torch.Tensor, /) -> object: ...
    def end(self) -> object: ...


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
    attention_mask: torch.Tensor | None = None,
) -> GenerationOutput:
    """Continues input_ids (B, L) up to max_length tokens, the prompt included.

    Args:
        model: called as model(input_ids, position_ids=, inference_params=, num_last_tokens=1).logits. Its vocabulary is
            config.vocab_size tokens, or vocab_size where it has no config: tokens given must be below it, and logits
            beyond it, those of a padded vocabulary, are never drawn.
        top_k, top_p, min_p, temperature: see sample. repetition_penalty: on every earlier token; 1: off.
        eos_token_id: one token or several; a row that draws one goes on with the first of them; the loop ends when
            every row has.
        teacher_outputs: (B, length); its tokens are taken instead of drawn ones as far as it reaches.
        vocab_size: draw only from the first vocab_size tokens; None: from the model's vocabulary. A larger one takes in
            rows that pad the embedding, where these were trained.
        cg: run the steps as a CUDA graph, kept in model._decoding_cache for further calls. Hooks' Python runs when it
            is captured, not at each step; after a switch inside a module (an adapter turned off) set that to None. A
            model that is not on a GPU decodes without, and a warning says so. Without penalty, teacher and scores the
            graph of top_k=1 chooses the token too, and nothing else runs between two steps.
        enable_timing: print the time of the whole call. output_scores: keep the logits of each new token.
        streamer: put(tokens on the CPU) is called with the prompt and each step's tokens (B), then end().
        attention_mask: (B, L) bool or integers, 1 at tokens, 0 at padding before or behind them: each row is continued
            as if it were alone and without padding. The model is then called with attention_mask=, its padding before
            the tokens, at the first call.

    Returns:
        GenerationOutput: sequences (B, length), scores: a tuple of (B, vocabulary, not padded) before penalty and
        filters, or None.

    Raises:
        ValueError: an argument is out of its range; a token is not in the vocabulary; attention_mask has a row without
        tokens, or padding between them (on a GPU, to look at them is one synchronisation a call, and two more for
        attention_mask).

    Same as upstream's mamba_ssm.utils.generation.decode, which returns transformers' classes with these fields.
    """
    check_sampling(top_k, top_p, min_p, temperature, repetition_penalty)
    known = _vocabulary(model)
    vocab_size = known if vocab_size is None else _positive("vocab_size", vocab_size)
    if known is not None and vocab_size is not None:
        known = max(known, min(vocab_size, _positive("vocab_size", getattr(model, "vocab_size", known))))
    max_length = _positive("max_length", max_length)
    input_ids, teacher_outputs = _check_lengths(input_ids, max_length, teacher_outputs, known)
    prompts = prompts_of(input_ids, attention_mask)
    device = next(model.parameters()).device
    batch, prompt = input_ids.shape
    if cg and device.type != "cuda":
        message = f"generate: cg=True needs the model on a CUDA device, it is on {device}: decoding without CUDA graphs"
        warnings.warn(message, stacklevel=_outside())
        cg = False
    eos = None if eos_token_id is None else _eos_tokens(eos_token_id, input_ids.device)
    ended = None if eos is None else torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    cache = steps = None
    if cg:
        known_cache = getattr(model, "_decoding_cache", None)
        if top_k == 1 and repetition_penalty == 1.0 and teacher_outputs is None and not output_scores:
            cache = cache_for(model, known_cache, batch, max_length)
            steps = greedy_steps(model, cache, batch, vocab_size, 0 if eos is None else eos.numel())
        else:
            cache = update_graph_cache(model, known_cache, batch, prompt, max_length)
        model._decoding_cache = cache  # type: ignore[assignment]  # a module takes any attribute
        inference_params = cache.inference_params
        cache.start(batch, max_length)
    else:
        inference_params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
        inference_params.undisturbed = streamer is None and _runs_alone(model)
        if prompts.skipped is not None:
            inference_params.lengths_per_sample = torch.zeros(batch, dtype=torch.int32, device=input_ids.device)
    timer = _Timer(device) if enable_timing else None
    if streamer is not None:
        streamer.put(input_ids.cpu())
    sequences = input_ids.new_empty(batch, max_length)
    sequences[:, :prompt] = input_ids
    position_ids = torch.empty(batch, 1, dtype=torch.long, device=input_ids.device)
    scores, end, tokens = [], prompt, prompts.tokens
    while end < max_length:
        offset = inference_params.seqlen_offset
        place = prompts.positions(offset)
        position_ids[:, 0] = place
        one: dict[str, typing.Any] = {"inference_params": inference_params, "num_last_tokens": 1}
        if offset == 0:
            logits = model(tokens, position_ids=None, **one, **prompts.first_call).logits
        elif cache is not None:
            logits = cache.run(tokens, position_ids, place)
        else:
            if inference_params.lengths_per_sample is not None:
                inference_params.lengths_per_sample.copy_(position_ids[:, 0])
            logits = model(tokens, position_ids=position_ids, **one).logits
        logits = logits.squeeze(1)
        inference_params.seqlen_offset = end
        if output_scores:
            scores.append(logits[:, :vocab_size])
        if teacher_outputs is not None and end < teacher_outputs.shape[1]:
            token = teacher_outputs[:, end]
        else:
            if repetition_penalty != 1.0:  # before the vocabulary is cut: the prompt may hold any token
                seen = torch.cat([prompts.seen, sequences[:, prompt:end]], dim=1)
                logits = modify_logit_for_repetition_penalty(logits.clone(), seen, repetition_penalty)
            token = sample(logits[:, :vocab_size], top_k, top_p, min_p, temperature)
            if eos is not None and ended is not None:
                token = torch.where(ended, eos[0], token)
        sequences[:, end] = token
        tokens = token.unsqueeze(1)
        end += 1
        if streamer is not None:
            streamer.put(token.cpu())
        if eos is not None and ended is not None:
            ended |= torch.isin(token, eos)
            if ended.all():
                break
        if steps is not None:
            steps.begin(token, prompts.positions(end - 1), end, eos, ended)
            end = _follow(steps, sequences, end, max_length, streamer)
            inference_params.seqlen_offset = end - 1
            break
    if streamer is not None:
        streamer.end()
    if timer is not None:
        print(f"Prompt processing + decoding time: {timer.milliseconds():.0f}ms")
    return GenerationOutput(sequences[:, :end], tuple(scores) if output_scores else None)


def _follow(steps: GreedySteps, sequences: torch.Tensor, end: int, max_length: int, streamer: Streamer | None) -> int:
    """The tokens from end on, greedily, into sequences; returns where they end."""
    first = end
    while end < max_length:
        token = steps.run()
        end += 1
        if streamer is not None:
            streamer.put(token.cpu())
        if steps.ended is not None and steps.ended.all():
            break
    sequences[:, first:end] = steps.sequences[:, first:end]
    return end


def _runs_alone(model: nn.Module) -> bool:
    """Whether a call of the model itself, not of its submodules, runs this package's code alone."""
    return type(model).__module__.startswith("mamba_ssm.") and is_bare(model, type(model))


def _outside() -> int:
    """The stacklevel, for a warning in the function that asks, of the caller outside of this package: that of decode,
    or of generate, with torch's wrappers between.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("mamba_ssm", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _check_tokens(name: str, tokens: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """tokens as int64; out of the vocabulary they would stop a CUDA device for good."""
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"generate: {name} must be an int64 tensor (B, L), got {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"generate: {name} must be int64 (B, L) with at least one token, got "
            f"{str(tokens.dtype).removeprefix('torch.')} {tuple(tokens.shape)}"
        )
    if tokens.is_meta:
        raise ValueError(f"generate: {name} must hold tokens, got a meta tensor")
    if vocab_size is not None:
        strange = (tokens < 0) | (tokens >= vocab_size)
        if strange.any():
            row, position = strange.nonzero()[0].tolist()
            raise ValueError(
                f"generate: {name} must hold tokens from 0 to {vocab_size - 1}, since the vocabulary has {vocab_size}, "
                f"got {int(tokens[row, position])} in row {row} at position {position}; if rows that pad the embedding "
                "were trained, give vocab_size"
            )
    return tokens.long()


def _check_lengths(
    input_ids: torch.Tensor, max_length: int, teacher_outputs: torch.Tensor | None, vocab_size: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """input_ids and teacher_outputs as _check_tokens has them; raises if the three do not fit each other."""
    input_ids = _check_tokens("input_ids", input_ids, vocab_size)
    if max_length <= input_ids.shape[1]:
        raise ValueError(
            f"generate: max_length counts the prompt too and must exceed its {input_ids.shape[1]} tokens, got "
            f"{max_length}"
        )
    if teacher_outputs is None:
        return input_ids, None
    teacher_outputs = _check_tokens("teacher_outputs", teacher_outputs, vocab_size)
    if teacher_outputs.shape[0] != input_ids.shape[0]:
        raise ValueError(
            f"generate: teacher_outputs must have input_ids' {input_ids.shape[0]} rows, got {teacher_outputs.shape[0]}"
        )
    return input_ids, teacher_outputs


def _vocabulary(model: nn.Module) -> int | None:
    """How many tokens the model knows, without those that pad its embedding; None where it does not say."""
    for owner in (getattr(model, "config", None), model):
        size: typing.Any = getattr(owner, "vocab_size", None)
        if hasattr(size, "__index__"):
            return operator.index(size)
    return None


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


def _refuse_unknown(given: Iterable[str]) -> None:
    """Arguments of generate that it does not have."""
    known = inspect.signature(decode).parameters.keys() - {"model"}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
            raise TypeError(f"generate: there is no argument {name!r}: {cure}")


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
        streamer, attention_mask (prompts of different lengths).

        Raises: TypeError: there is no such argument. ValueError: as decode.
        """
        _refuse_unknown(kwargs)
        head = getattr(self, "lm_head", None)
        if isinstance(head, ColumnParallelLinear) and head.process_group is not None and head.process_group.size() > 1:
            raise ValueError(
                "generate: lm_head has this rank's part of the vocabulary: take a model whose head is whole, with the "
                "ranks' weights gathered"
            )
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
