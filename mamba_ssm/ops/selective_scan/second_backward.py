"""The selective scan's second derivative: gradients of its backward operator's arguments.

The gradients are those of S = sum(dout * out) + sum(dlast_state * last_state), whose Hessian is symmetric: so the
gradients of backward's arguments, from those of its results, are the tangents of out, last_state and backward's results
where inputs move by these gradients. What goes before and behind the states is differentiated here, element by element;
the states by an operator.
Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import call
from mamba_ssm.ops._shared.gradients import silu_derivatives
from mamba_ssm.ops._shared.reference import convert
from mamba_ssm.ops.selective_scan.arguments import Inputs
from mamba_ssm.ops.selective_scan.double_backward import Tangents, double_backward_op


def tangents_of_backward(
    inputs: Inputs,
    directions: Inputs,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    softplus: bool,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, Inputs]:
    """Tangents of out, last_state and the gradients of inputs, where inputs move by directions, in which None is zero.
    float32, whatever the inputs are.
    """
    tensors = [convert(tensor, torch.float32) for tensor in inputs[:-1]]
    u, delta, A, B, C, D, z, bias, initial_state = tensors
    du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial_state = (
        torch.zeros_like(of) if to is None and of is not None else convert(to, torch.float32)
        for to, of in zip(directions[:-1], tensors, strict=True)
    )
    step = _Step(delta, ddelta, bias, dbias, softplus)
    gate = _Gate(dout.float(), z, dz)
    groups = max(variable(matrix, u).shape[1] for matrix in (B, C))
    matrices, dmatrices = ([grouped(matrix, u, groups) for matrix in pair] for pair in ((B, C), (dB, dC)))
    found = Tangents(
        *call(
            double_backward_op,
            *(u, step.dt, A, *matrices, initial_state, inputs.seq_idx, gate.dy, dlast_state),
            *(du, step.dt_tangent, dA, *dmatrices, dinitial_state, gate.dy_tangent, reverse),
        )
    )
    y, y_tangent, of_u, of_D = found.out, found.out_tangent, found.du_tangent, None
    if D is not None:
        D, dD = D[:, None], dD[:, None]
        y, y_tangent = y.addcmul(D, u), y_tangent.addcmul(D, du).addcmul_(dD, u)
        of_u = of_u.addcmul(D, gate.dy_tangent).addcmul_(dD, gate.dy)
        of_D = torch.mul(gate.dy_tangent, u).addcmul_(gate.dy, du).sum((0, 2))
    of_delta = step.gradient_tangent(found.ddelta, found.ddelta_tangent)
    of_inputs = Inputs(
        u=of_u,
        delta=of_delta,
        A=found.dA_tangent,
        B=_summed(found.dB_tangent, B),
        C=_summed(found.dC_tangent, C),
        D=of_D,
        z=None if z is None else gate.z_tangent(y, y_tangent),
        delta_bias=None if bias is None else of_delta.sum((0, 2)),
        initial_state=found.dinitial_state_tangent,
        seq_idx=None,
    )
    return gate.out_tangent(y, y_tangent), found.last_state_tangent, of_inputs


class _Step:
    """dt = softplus?(delta + bias) and its tangent."""

    def __init__(self, delta, delta_tangent, bias, bias_tangent, softplus):
        if bias is not None:
            delta, delta_tangent = delta + bias[:, None], delta_tangent + bias_tangent[:, None]
        self.dt, self.dt_tangent, self.softplus = delta, delta_tangent, softplus
        if softplus:
            self.dt, self.slope = F.softplus(delta), torch.sigmoid(delta)
            self.dt_tangent = self.slope * delta_tangent
            self.slope_tangent = (1 - self.slope).mul_(self.dt_tangent)

    def gradient_tangent(self, ddt, ddt_tangent):
        """Of delta's gradient, from dt's."""
        return torch.mul(ddt_tangent, self.slope).addcmul_(ddt, self.slope_tangent) if self.softplus else ddt_tangent


class _Gate:
    """out = y silu(z), or y without z: the gradient of y, and its tangent."""

    def __init__(self, dout, z, z_tangent):
        self.dout, self.dy, self.dy_tangent, self.slope = dout, dout, torch.zeros_like(dout), None
        if z is not None:
            self.silu, self.slope, curve = silu_derivatives(z)
            self.silu_tangent, self.slope_tangent = self.slope * z_tangent, curve.mul_(z_tangent)
            self.dy, self.dy_tangent = dout * self.silu, dout * self.silu_tangent

    def out_tangent(self, y, y_tangent):
        return y_tangent if self.slope is None else torch.mul(y_tangent, self.silu).addcmul_(y, self.silu_tangent)

    def z_tangent(self, y, y_tangent):
        """Of the gradient of z."""
        return torch.mul(y_tangent, self.slope).addcmul_(y, self.slope_tangent).mul_(self.dout)


def variable(matrix: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """B or C in any of its forms as (B, G, N, L)."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(u.shape[0], -1, -1, u.shape[2])
    return matrix.unsqueeze(1) if matrix.dim() == 3 else matrix


def grouped(matrix: torch.Tensor, u: torch.Tensor, groups: int) -> torch.Tensor:
    """The same with so many groups."""
    matrix = variable(matrix, u)
    return matrix if matrix.shape[1] == groups else matrix.repeat_interleave(groups // matrix.shape[1], dim=1)


def _summed(gradient, matrix):
    """The gradient of B or C from that of grouped."""
    if matrix.dim() == 2:
        return gradient.sum((0, 3))
    groups = matrix.shape[1] if matrix.dim() == 4 else 1
    if groups < gradient.shape[1]:
        gradient = gradient.unflatten(1, (groups, -1)).sum(2)
    return gradient.view_as(matrix)
