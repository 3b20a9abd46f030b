"""CUDA graphs of decoding steps: what a step costs is then the GPU's time, not Python's."""

import typing
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn as nn

from mamba_ssm._torch import autocast_dtype, autocast_without_cache, reference
from mamba_ssm.ops.linear import NextStep, greedy_step
from mamba_ssm.utils._inference_params import InferenceParams

Step: typing.TypeAlias = Callable[[torch.Tensor, torch.Tensor, int | torch.Tensor], torch.Tensor]


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
        self.greedy: dict[tuple[int, int | None, int], GreedySteps] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, in copies and pickles of a model that holds this: a CUDA graph can be neither copied nor saved."""
        return type(None), ()

    def start(self, batch: int, max_seqlen: int | None = None) -> None:
        """Ready for new sequences, or for a capture, which takes the longest ones."""
        self.inference_params.reset(self.max_seqlen if max_seqlen is None else max_seqlen, batch)
        self.select(batch)

    def select(self, batch: int) -> None:
        """Points inference_params at a batch's rows, and run at its captured step."""
        self.inference_params.key_value_memory_dict = {
            layer: tuple(None if state is None else state[:batch] for state in states)
            for layer, states in self.states.items()
        }
        self.inference_params.lengths_per_sample = self.lengths[:batch]
        self.run = self.callables.get(batch)


def _key(model: nn.Module, dtype: torch.dtype | None) -> tuple[typing.Any, ...]:
    """What a captured graph depends on: it reads parameters and buffers where they lay, and holds what modules, hooks
    and autocast did.
    """
    tensors = tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*model.parameters(), *model.buffers()))
    # hooks by number
    modules = tuple((type(m), m.training, *m._forward_pre_hooks, *m._forward_hooks) for m in model.modules())
    return dtype, autocast_dtype(next(model.parameters())), tensors, modules


def cache_for(
    model: nn.Module, cache: DecodingCGCache | None, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
) -> DecodingCGCache:
    """cache itself if it serves this batch size and length, else a new one."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(f"generate: cg=True needs the model on a CUDA device, it is on {device}; use cg=False")
    if reference.on:
        raise RuntimeError("generate: cg=True captures kernels, and within plain_torch none are run; use cg=False")
    if cache is None or cache.key != _key(model, dtype) or cache.max_batch_size < batch_size:
        cache = DecodingCGCache(model, batch_size, max_seqlen, dtype)
    elif cache.max_seqlen < max_seqlen:
        cache = DecodingCGCache(model, cache.max_batch_size, max_seqlen, dtype)
    return cache


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
        RuntimeError: the model is not on a GPU, or plain_torch is on. ValueError: decoding_seqlens is not (1,).

    Same as upstream's mamba_ssm.utils.generation.update_graph_cache.
    """
    if tuple(decoding_seqlens) != (1,):
        raise ValueError(f"update_graph_cache: a step decodes one token, decoding_seqlens=(1,), got {decoding_seqlens}")
    cache = cache_for(model, cache, batch_size, max_seqlen, dtype)
    if batch_size not in cache.callables:
        cache.start(batch_size)
        arguments = model, cache.inference_params, batch_size, cache.max_seqlen, 1, cache.mempool, n_warmups
        cache.callables[batch_size] = capture_graph(*arguments)
    return cache


@torch.inference_mode()
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
    logits. offset: an integer, or (B) integers where rows differ. inference_params holds the states that it reads and
    writes, and lengths_per_sample (B) int32; these may not be replaced. The model's weights may change in place, also
    those that autocast casts: the graph casts them again. update_graph_cache makes all of this.

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
    captured = _Captured(model, inference_params, batch_size, max_seqlen, mempool, n_warmups)

    @torch.inference_mode()
    def run(new_input_ids: torch.Tensor, new_position_ids: torch.Tensor, seqlen: int | torch.Tensor) -> torch.Tensor:
        captured.feed(new_input_ids, new_position_ids, seqlen)
        captured.graph.replay()
        return captured.logits.clone()

    return run


class _Captured:
    """The CUDA graph of a step, with what it reads and writes. choose(logits, captured): what it does behind the model.

    lengths: inference_params.lengths_per_sample.
    """

    def __init__(
        self,
        model: nn.Module,
        inference_params: InferenceParams,
        batch_size: int,
        max_seqlen: int,
        mempool: typing.Any,
        n_warmups: int,
        choose: "Callable[[torch.Tensor, _Captured], None] | None" = None,
    ) -> None:
        parameter = next(model.parameters())
        device = parameter.device
        self.input_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self.position_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self.lengths = typing.cast(torch.Tensor, inference_params.lengths_per_sample)
        before = inference_params.seqlen_offset
        # any position that is not the first; the true one is read from lengths
        inference_params.seqlen_offset = offset = max_seqlen - 1

        def step() -> torch.Tensor:
            cache = {"inference_params": inference_params, "num_last_tokens": 1}
            logits: torch.Tensor = model(self.input_ids, position_ids=self.position_ids, **cache).logits
            if choose is not None:
                choose(logits, self)
            return logits

        with torch.cuda.device(device), autocast_without_cache(parameter):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(n_warmups):
                    self.lengths.fill_(offset)
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=mempool):
                self.logits = step()
        inference_params.seqlen_offset = before

    def feed(self, input_ids: torch.Tensor, position_ids: int | torch.Tensor, lengths: int | torch.Tensor) -> None:
        """What the next replay reads: tokens (B, 1), and their positions."""
        self.input_ids.copy_(input_ids)
        for ours, given in ((self.position_ids, position_ids), (self.lengths, lengths)):
            ours.copy_(given) if isinstance(given, torch.Tensor) else ours.fill_(given)


class GreedySteps:
    """Captured steps that choose greedily and feed themselves: between two of them the host does nothing else.

    model, cache: as cache_for returns it. vocab_size: the first logits to choose from, None: all. eos_count: how many
    tokens end a row.
    """

    def __init__(
        self, model: nn.Module, cache: DecodingCGCache, batch_size: int, vocab_size: int | None, eos_count: int
    ) -> None:
        zeros = partial(torch.zeros, device=cache.lengths.device)
        self.sequences = zeros(batch_size, cache.max_seqlen, dtype=torch.long)
        self.ends = zeros(batch_size, dtype=torch.long)
        self.eos = zeros(eos_count, dtype=torch.long) if eos_count else None
        self.ended = zeros(batch_size, dtype=torch.bool) if eos_count else None

        def choose(logits: torch.Tensor, captured: _Captured) -> None:
            positions = captured.position_ids[:, 0], captured.lengths
            written = NextStep(captured.input_ids[:, 0], self.sequences, self.ends, *positions, self.eos, self.ended)
            greedy_step(logits[:, -1, :vocab_size], written)

        self._captured = _Captured(
            model, cache.inference_params, batch_size, cache.max_seqlen, cache.mempool, n_warmups=2, choose=choose
        )

    def begin(
        self,
        token: torch.Tensor,
        place: int | torch.Tensor,
        end: int,
        eos: torch.Tensor | None,
        ended: torch.Tensor | None,
    ) -> None:
        """token (B): the last one chosen, at this place of its row, or (B) places. end: where the next ones go to."""
        positions = place.unsqueeze(1) if isinstance(place, torch.Tensor) else place
        self._captured.feed(token.unsqueeze(1), positions, place)
        self.ends.fill_(end)
        for ours, given in ((self.eos, eos), (self.ended, ended)):
            if ours is not None and given is not None:
                ours.copy_(given)

    def run(self) -> torch.Tensor:
        """The next token of each row (B), until the next call."""
        self._captured.graph.replay()
        return self._captured.input_ids[:, 0]


def greedy_steps(
    model: nn.Module, cache: DecodingCGCache, batch_size: int, vocab_size: int | None, eos_count: int
) -> GreedySteps:
    """The cache's, captured at the first call of a kind."""
    key = batch_size, vocab_size, eos_count
    if key not in cache.greedy:
        cache.start(batch_size)
        cache.greedy[key] = GreedySteps(model, cache, *key)
    return cache.greedy[key]
