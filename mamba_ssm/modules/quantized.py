"""Linear layers and embeddings whose weights are int8 with a float16 scale for each 32 of a row."""

import typing
from collections.abc import Callable

import torch
import torch.nn as nn

from mamba_ssm._torch import is_plain
from mamba_ssm.ops.linear import (
    dequantize,
    normed_linear,
    quantize_weight,
    quantized_linear,
    scales_shape,
    takes_norm,
)

WEIGHT, SCALES = ".weight", ".scales"  # of state-dict names
_Model = typing.TypeVar("_Model", bound=nn.Module)


class _Quantized(nn.Module):
    """weight and scales as parameters without gradients, which tied modules share and .to(device) keeps shared."""

    weight: nn.Parameter
    scales: nn.Parameter

    def _make_weight(self, shape: tuple[int, int], device: torch.device | str | int | None) -> None:
        weight = torch.zeros(shape, dtype=torch.int8, device=device)
        scales = torch.zeros(scales_shape(shape), dtype=torch.float16, device=device)
        self.share_weight(nn.Parameter(weight, requires_grad=False), nn.Parameter(scales, requires_grad=False))

    def share_weight(self, weight: nn.Parameter, scales: nn.Parameter) -> None:
        """Takes another module's parameters, without a copy."""
        self.weight, self.scales = weight, scales

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight (out, in) in a floating dtype: a new tensor."""
        return dequantize(self.weight, self.scales, dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> typing.Any:
        scales = self.scales.data
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float16:  # .to(dtype) is for activations; bfloat16 would round the scales
            self.scales.data = scales.to(self.scales.device)
        return self

    def _load_from_state_dict(
        self, state_dict: typing.Any, prefix: str, metadata: typing.Any, strict: bool, *problems: list[str]
    ) -> None:
        for name, dtype in (("weight", torch.int8), ("scales", torch.float16)):
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.dtype != dtype:  # which copying would cut to integers
                problems[-1].append(
                    f"{prefix}{name} must be {dtype}, got {given.dtype}: load such weights into the model before "
                    "mamba_ssm.quantize"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *problems)


class QuantizedLinear(_Quantized, nn.Linear):  # type: ignore[misc]  # weight is theirs too
    """nn.Linear of an int8 weight: (..., in_features) -> (..., out_features), in the input's dtype.

    State-dict names: weight, int8 (out, in); scales, float16 (out, ceil(in / 32)); bias (out), if there is one. A
    weight counts weight * scale of its 32 neighbours: the numbers of a Q8_0 block of llama.cpp. Weight and scales have
    no gradients and keep their dtypes in .to(dtype). isinstance says nn.Linear, so that peft puts LoRA on it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self._make_weight((out_features, in_features), device)
        self.bias: nn.Parameter | None  # type: ignore[assignment]
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def like(cls, linear: nn.Linear) -> "QuantizedLinear":
        """Of the same sizes, device and mode, with linear's own bias; weight and scales are zeros."""
        weight = linear.weight
        made = cls(linear.in_features, linear.out_features, bias=False, device=weight.device)
        made.bias = linear.bias
        return made.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self.weight, self.scales, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight=int8"


class QuantizedEmbedding(_Quantized, nn.Embedding):  # type: ignore[misc]
    """nn.Embedding of an int8 weight: integers (...) -> (..., embedding_dim) of `dtype`, which .to(dtype) changes.

    State-dict names: weight, int8 (num_embeddings, embedding_dim); scales, float16 (num_embeddings, ceil(dim / 32)). An
    index beyond num_embeddings raises IndexError on the CPU; on CUDA its row is NaN.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self._make_weight((num_embeddings, embedding_dim), device)

    @classmethod
    def like(cls, embedding: nn.Embedding) -> "QuantizedEmbedding":
        """Of the same sizes, device, dtype and mode; weight and scales are zeros."""
        weight = embedding.weight
        made = cls(embedding.num_embeddings, embedding.embedding_dim, weight.device, weight.dtype)
        return made.train(embedding.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dequantize(self.weight, self.scales, self.dtype, input)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> typing.Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight=int8, dtype={self.dtype}"


class StepNorm(typing.NamedTuple):
    """What a layer has in front of its block's step: the residual stream, and an RMSNorm's weight and eps."""

    residual: torch.Tensor | None
    weight: torch.Tensor
    eps: float
    residual_in_fp32: bool  # of the sum where there is no residual


def project_normed(projection: nn.Module, norm: StepNorm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """projection(rms_norm(x + residual)), (1, out), and the sum of x (1, 1, in), by one kernel; None if none can."""
    residual = norm.residual
    if x.dim() != 3 or not is_plain(projection, QuantizedLinear):
        return None
    if not takes_norm(x, residual, norm.weight, projection.weight):
        return None
    given = x[0], residual if residual is None else residual[0], norm.weight
    of_projection = projection.weight, projection.scales, projection.bias
    try:
        out, total = normed_linear(*given, *of_projection, norm.eps, norm.residual_in_fp32)
    except NotImplementedError:  # utils.kernels.without has turned the kernel off
        return None
    return out, total[None]


def quantize(model: _Model) -> _Model:
    """Replaces the large weights of a model by int8, in place, and returns it: a quarter of float32's memory.

    Replaced are, in MambaLMHeadModel and in our blocks, also within a model of your own, the projections in and out of
    each layer (in_proj, out_proj, Mamba's x_proj), the MLPs' fc1 and fc2, the embedding and the head, which stay one
    storage where they are tied. Norms, convolutions, A, D and dt's projection stay, and so does what is int8 already.
    state-dict names: see QuantizedLinear. For a copy, quantize(copy.deepcopy(model)).

    Raises:
        TypeError: model is no module, or a projection is more than an nn.Linear (adapters, hooks, tensor parallel).
        ValueError: model has nothing to replace, or a weight is not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model must be a torch.nn.Module, got {type(model).__name__}")
    found = quantizable(model)
    if not found:
        raise ValueError(
            "quantize: the model has no layer of mamba_ssm (MambaLMHeadModel, Mamba, Mamba2, Mamba3, MHA, GatedMLP, "
            "...) whose weights could be int8"
        )
    for name, module in found.items():
        _check_plain(name, module)
    weights = {id(module.weight): module.weight for module in found.values() if not is_quantized(module)}
    new = {}
    for key, weight in weights.items():
        try:
            values, scales = quantize_weight(weight)
        except ValueError as error:
            name = next(name for name, module in found.items() if module.weight is weight)
            raise ValueError(f"{error} in {name or 'the model'}") from None
        new[key] = nn.Parameter(values, requires_grad=False), nn.Parameter(scales, requires_grad=False)
    for name, module in found.items():
        if not is_quantized(module):
            replace_by_quantized(model, name).share_weight(*new[id(module.weight)])
    return model


def quantizable(model: nn.Module) -> dict[str, typing.Any]:
    """{name: module} of what quantize replaces, or has replaced: layers list their own in `int8_weights`."""
    found = {}
    for prefix, owner in model.named_modules():
        for name in getattr(owner, "int8_weights", ()):
            module = owner._modules.get(name)
            if module is not None:
                found[f"{prefix}.{name}" if prefix else name] = module
    return found


def of_weight(name: str) -> tuple[str, str]:
    """The state-dict names of a weight and of its scales, which it has if it is int8."""
    return name, name.removesuffix(WEIGHT) + SCALES


def is_quantized(module: nn.Module) -> bool:
    """Whether it is one of the two classes above."""
    return isinstance(module, _Quantized)


def replace_by_quantized(model: nn.Module, name: str) -> typing.Any:
    """Puts a quantised module, of zeros, in the place of model's nn.Linear or nn.Embedding of this name; returns it."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(name)
    cls: typing.Any = QuantizedEmbedding if isinstance(module, nn.Embedding) else QuantizedLinear
    made = cls.like(module)
    setattr(model.get_submodule(owner), last, made)
    return made


def _check_plain(name: str, module: nn.Module) -> None:
    plain = is_quantized(module) or is_plain(module, nn.Linear) or is_plain(module, nn.Embedding)
    if not plain or getattr(module, "process_group", None) is not None:
        what = "one with hooks" if type(module) in (nn.Linear, nn.Embedding) else f"{type(module).__name__}"
        raise TypeError(
            f"quantize: {name} must be an nn.Linear or nn.Embedding and no more, got {what}: quantise a model before "
            "adapters and hooks are put on it; layers that tensor parallelism has cut stay as they are"
        )
