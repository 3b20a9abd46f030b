"""The two directions of Mamba-2's scan by themselves, with upstream's arguments and results.

For projects that write an autograd.Function of their own around them. Outputs and gradients come from the kernels; what
upstream also returns of its chunks is computed in plain torch, so code that has no use for it is quicker with
mamba_chunk_scan_combined.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate, K chunks, Q chunk size.
"""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call, flat, make
from mamba_ssm.ops.ssd.arguments import NAME, Options, Ungated, check_options
from mamba_ssm.ops.ssd.backward import Wanted, of_inputs, ssd_backward_op
from mamba_ssm.ops.ssd.chunks import chunk_cumsum, chunk_state, state_passing
from mamba_ssm.ops.ssd.forward import gate_grads, mamba_chunk_scan_combined
from mamba_ssm.ops.ssd.reference import ssd_selective_scan


def combined_forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """mamba_chunk_scan_combined without a gradient: (out, out_x, dt, dA_cumsum, states, final_states), and with
    cu_seqlens varlen_states.

    out_x: out before the gate, None without z. dt and dA_cumsum (B, H, K, Q) float32. states (B, K, H, P, N): those
    that enter each chunk, of state_dtype or, if None, C's dtype. Final states are of state_dtype, too, or float32.
    """
    rest = D, None, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit
    with torch.no_grad():
        varlen = cu_seqlens is not None
        ungated, final_states, *varlen_states = mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size, *rest, True, return_varlen_states=varlen, state_dtype=state_dtype
        )
        out = ungated
        if z is not None:
            out = (ungated.float() * torch.nn.functional.silu(z.float())).to(x.dtype)
        dA_cumsum, steps = chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
        added = chunk_state(B, x, steps, dA_cumsum, seq_idx=seq_idx)
        initial = None if initial_states is None else initial_states.flatten(-2)
        passed = added.flatten(-2), dA_cumsum[..., -1], initial, seq_idx, chunk_size, state_dtype or C.dtype
        states = state_passing(*passed)[0].view_as(added)
    return out, None if z is None else ungated, steps, dA_cumsum, states, final_states, *varlen_states


def combined_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dfinal_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dx: torch.Tensor | None = None,
    ddt: torch.Tensor | None = None,
    dB: torch.Tensor | None = None,
    dC: torch.Tensor | None = None,
    dz: torch.Tensor | None = None,
    recompute_output: bool = False,
    state_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states), None for what is absent; with recompute_output also out
    after the gate.

    dt (B, L, H) as forward was given it. out: forward's out_x where z is given, read for dz and recompute_output alone.
    dx, ddt, dB, dC, dz: written if they are given. state_dtype has no effect: states are computed again, in float32.
    """
    options = Options(bool(dt_softplus), *check_options(NAME, chunk_size, dt_limit, state_dtype))
    A, D, dt_bias, initial_states, dfinal_states = (
        checks.widen(tensor) for tensor in (A, D, dt_bias, initial_states, dfinal_states)
    )
    ungated = make(Ungated, (x, dt, A, B, C, D, dt_bias, initial_states, seq_idx))
    with torch.no_grad():
        gated, dgate = out, None
        if z is not None:
            if recompute_output:
                gated = (out.float() * torch.nn.functional.silu(z.float())).to(x.dtype)
            dout, dgate = gate_grads(dout, out, z)
        arguments = flat(ungated, options, Wanted(initial_states is not None))
        grads = call(ssd_backward_op, dout, dfinal_states, *arguments)
        found = of_inputs(grads, dgate)._replace(
            x=checks.into(NAME, "dx", dx, grads[0]),
            dt=checks.into(NAME, "ddt", ddt, grads[1]),
            B=checks.into(NAME, "dB", dB, grads[3]),
            C=checks.into(NAME, "dC", dC, grads[4]),
            z=checks.into(NAME, "dz", dz, dgate),
        )
        results = *found[:-1], gated
    return results if recompute_output else results[:-1]


def selective_scan_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ddt (B, L, H), dA (H)) of ssd_selective_scan, float32; upstream's yardstick for its chunked gradients."""
    dt, A = (tensor.detach().float().requires_grad_() for tensor in (dt, A))
    with torch.enable_grad():
        out = ssd_selective_scan(x, dt, A, B, C, D, z)
        ddt, dA = torch.autograd.grad(out, (dt, A), dout)
    return ddt, dA
