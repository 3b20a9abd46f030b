"""CUDA graphs of decoding steps: what a step costs is then the GPU's time, not Python's."""

import typing
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from mamba_ssm._torch import autocast_dtype, autocast_without_cache, reference
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
    """What a captured graph depends on: it reads parameters and buffers where they lay, and holds what modules, hooks
    and autocast did.
    """
    tensors = tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*model.parameters(), *model.buffers()))
    # hooks by number
    modules = tuple((type(m), m.training, *m._forward_pre_hooks, *m._forward_hooks) for m in model.modules())
    return dtype, autocast_dtype(next(model.parameters())), tensors, modules


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
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise RuntimeError(f"generate: cg=True needs the model on a CUDA device, it is on {device}; use cg=False")
    if reference.on:
        raise RuntimeError("generate: cg=True captures kernels, and within plain_torch none are run; use cg=False")
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
    input_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    position_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    before = inference_params.seqlen_offset
    # any position that is not the first; the true one is read from lengths
    inference_params.seqlen_offset = offset = max_seqlen - 1
    lengths.fill_(offset)

    def step() -> torch.Tensor:
        return model(input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=1).logits

    with torch.cuda.device(device), autocast_without_cache(next(model.parameters())):
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

    @torch.inference_mode()
    def run(new_input_ids: torch.Tensor, new_position_ids: torch.Tensor, seqlen: int | torch.Tensor) -> torch.Tensor:
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        lengths.copy_(seqlen) if isinstance(seqlen, torch.Tensor) else lengths.fill_(seqlen)
        graph.replay()
        return logits.clone()

    return run
