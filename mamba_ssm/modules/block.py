"""One layer of a language model: residual, norm and mixer, then residual, norm and MLP."""

import typing
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._torch import COMPILES_FUNCTIONS, is_bare, is_compiling, is_plain, weight_and_bias
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.quantized import QuantizedLinear, StepNorm
from mamba_ssm.ops.block_node import IN_A_ROW, Layer, Norm
from mamba_ssm.ops.norm import RMSNorm, layer_norm_fn

# Of inputs of layers that are one node: larger ones keep a GPU busy for longer than the host needs for them.
_MOST_ELEMENTS, _MOST_CHANNELS = 1 << 23, 1024


class Block(nn.Module):
    """Adds the residual, norms, mixes; with an MLP all of that again for it.

    The residual stream is handed on beside the last output, which the next layer (or the model's last norm) adds to it,
    so that add and norm can be one kernel.

    Args:
        dim: width. mixer_cls, norm_cls: called with dim. mlp_cls: called with dim; nn.Identity: no MLP, no norm2.
        fused_add_norm: add and norm in one kernel; norm_cls must give LayerNorm or RMSNorm. A norm that is replaced
            later or has hooks is called alone.
        residual_in_fp32: keep the residual in float32.

    Same as upstream's mamba_ssm.modules.block.Block.
    """

    layer_idx: int | None  # which create_block sets

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer: typing.Any = mixer_cls(dim)
        self.mlp: nn.Module | None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        else:
            self.mlp = None
        if fused_add_norm and not isinstance(self.norm, (nn.LayerNorm, RMSNorm)):
            raise TypeError(
                f"Block: fused_add_norm takes LayerNorm or RMSNorm, got {type(self.norm).__name__}; pass "
                "fused_add_norm=False"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        inference_params: InferenceCache | None = None,
        **mixer_kwargs: typing.Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, residual (or None in the first layer) (B, L, dim) -> the same two, to be added later.

        inference_params and mixer_kwargs (seq_idx, cu_seqlens, attention_mask, ...) go to the mixer. What comes out of
        it is zero at padding; norms and MLP take each step alone.
        """
        checks.check_tensor("Block", "hidden_states", hidden_states)
        together = None
        if not any_given(mixer_kwargs):
            if inference_params is not None:
                together = self._norm_and_step(hidden_states, residual, inference_params)
            elif residual is not None:
                layer = self.as_layer(hidden_states, residual)
                together = None if layer is None else layer.node.of_layers(hidden_states, residual, [layer])
        if together is not None:
            hidden_states, residual = together
        else:
            hidden_states, residual = self._add_norm(hidden_states, residual, self.norm)
            hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._add_norm(hidden_states, residual, self.norm2)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def as_layer(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> Layer | None:
        """Residual, norm and mixer for an autograd node; None where they have to be called."""
        # of the type: a module around the mixer, such as FSDP, passes attributes on
        as_layer, norm = getattr(type(self.mixer), "as_layer", None), self.norm
        if as_layer is None or not self.fused_add_norm or not is_fusible(norm):
            return None
        if is_compiling() and not COMPILES_FUNCTIONS:
            return None
        if residual.dtype not in (hidden_states.dtype, torch.float32):
            return None
        given = Norm(*weight_and_bias(norm), float(norm.eps), isinstance(norm, RMSNorm))
        layer: Layer | None = as_layer(self.mixer, given, hidden_states)
        if layer is not None and is_compiling() and not _has_parameters_alone(layer):
            return None
        return layer

    def _norm_and_step(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, inference_params: InferenceCache
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same of a step from the cache, whose norm and in_proj are one kernel."""
        if not self.fused_add_norm or type(getattr(self.mixer, "in_proj", None)) is not QuantizedLinear:
            return None
        step_after_norm, norm = getattr(type(self.mixer), "step_after_norm", None), self.norm
        if step_after_norm is None or not is_plain(norm, RMSNorm):
            return None
        given = StepNorm(residual, norm.weight, float(norm.eps), self.residual_in_fp32)
        together: tuple[torch.Tensor, torch.Tensor] | None
        together = step_after_norm(self.mixer, given, hidden_states, inference_params)
        return together

    def _add_norm(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, norm: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(hidden_states, residual, norm, self.fused_add_norm, self.residual_in_fp32)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: typing.Any
    ) -> typing.Any:
        """The mixer's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


def through_layers(
    layers: Iterable[nn.Module],
    hidden_states: torch.Tensor,
    inference_params: InferenceCache | None,
    mixer_kwargs: Mapping[str, typing.Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the last of these Blocks or their likes gives. In training, small layers are one autograd node several at a
    time, unless somebody would see that a layer of them is not called.
    """
    layers = list(layers)
    residual: typing.Any = None
    may_join = torch.is_grad_enabled() and not torch.jit.is_tracing()
    may_join = may_join and inference_params is None and not any_given(mixer_kwargs)
    while layers:
        row: list[Layer] = []
        if may_join and residual is not None and _is_small(hidden_states):
            row = _row(layers[:IN_A_ROW], hidden_states, residual)
        if len(row) == IN_A_ROW:
            hidden_states, residual = row[0].node.of_layers(hidden_states, residual, row)
        else:
            for layer in row:
                hidden_states, residual = layer.node.of_layers(hidden_states, residual, [layer])
        if not row:
            hidden_states, residual = layers[0](
                hidden_states, residual, inference_params=inference_params, **mixer_kwargs
            )
        layers = layers[max(1, len(row)) :]
    return hidden_states, residual


def _has_parameters_alone(layer: Layer) -> bool:
    """Whether its tensors are parameters, whose sizes a compiler never leaves open."""
    tensors = layer.norm.weight, layer.norm.bias, *layer.others
    return all(tensor is None or isinstance(tensor, nn.Parameter) for tensor in tensors)


def _is_small(hidden_states: torch.Tensor) -> bool:
    """Whether layers of this input may be one node, and a gradient of it is wanted."""
    small = hidden_states.shape[-1] <= _MOST_CHANNELS and hidden_states.numel() <= _MOST_ELEMENTS
    return small and hidden_states.requires_grad


def _row(layers: list[nn.Module], hidden_states: torch.Tensor, residual: torch.Tensor) -> list[Layer]:
    """As many of the first layers as one node takes them."""
    row: list[Layer] = []
    for layer in layers:
        one = layer.as_layer(hidden_states, residual) if is_bare(layer, Block) and layer.mlp is None else None
        if one is None or (row and one.node is not row[0].node):
            break
        row.append(one)
    return row


def any_given(options: Mapping[str, typing.Any]) -> bool:
    """Whether any is not None."""
    return any(option is not None for option in options.values())


def is_fusible(norm: nn.Module) -> typing.TypeGuard[RMSNorm | nn.LayerNorm]:
    """Whether norm is no more than its parameters, so that a kernel or a node may take these."""
    return is_plain(norm, RMSNorm) or (is_plain(norm, nn.LayerNorm) and norm.weight is not None)


def add_norm(
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    norm: nn.Module,
    fused: bool,
    residual_in_fp32: bool,
    prenorm: bool = True,
) -> typing.Any:
    """norm(hidden_states + residual), with prenorm and the sum; residual None counts as zero."""
    if fused and is_fusible(norm):
        return layer_norm_fn(
            hidden_states,
            norm.weight,
            norm.bias,
            residual=residual,
            eps=norm.eps,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=isinstance(norm, RMSNorm),
        )
    residual = hidden_states if residual is None else hidden_states + residual
    weight = getattr(norm, "weight", None)  # a norm that was put in place of ours may have none
    hidden_states = norm(residual.to(hidden_states.dtype if weight is None else weight.dtype))
    if not prenorm:
        return hidden_states
    return hidden_states, residual.float() if residual_in_fp32 else residual
