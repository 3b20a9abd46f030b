"""The gated MLP of hybrid language models, with upstream's parameter names."""

import typing
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_flags, check_integer
from mamba_ssm.modules._inputs import check_projections
from mamba_ssm.ops.linear import project
from mamba_ssm.ops.norm import swiglu


class GatedMLP(nn.Module):
    """y * activation(gate) between two projections: (..., in_features) -> (..., out_features).

    Args:
        hidden_features: width in between, 8/3 in_features if None; rounded up to a multiple of multiple_of.
        out_features: in_features if None. activation: a function of the gate. bias: of both projections.

    fc1 gives (y, gate) in this order. Same as upstream's mamba_ssm.modules.mlp.GatedMLP.
    """

    int8_weights = "fc1", "fc2"
    in_features: int | None = None  # of a module pickled whole before it was kept: fc1 checks

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        check_integer("GatedMLP", "in_features", in_features)
        out_features = in_features if out_features is None else out_features
        hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
        check_integer("GatedMLP", "hidden_features", hidden_features)
        check_integer("GatedMLP", "out_features", out_features)
        check_integer("GatedMLP", "multiple_of", multiple_of)
        check_flags("GatedMLP", bias=bias)
        hidden_features = -(-hidden_features // multiple_of) * multiple_of
        self.in_features = in_features
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias, **factory)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        checks.check_tensor("GatedMLP", "the input", x)
        if x.dim() == 0 or self.in_features not in (None, x.shape[-1]):
            raise ValueError(
                f"GatedMLP: the input must be (..., in_features) with in_features = {self.in_features}, got "
                f"{tuple(x.shape)}"
            )
        check_projections("GatedMLP", self, x, ("fc1", "fc2"), in_torch=True)
        if self.activation is F.silu and x.dtype in checks.FLOAT_DTYPES and not torch.is_grad_enabled():
            return project(self.fc2, swiglu(project(self.fc1, x), gate_last=True))
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * self.activation(gate))
