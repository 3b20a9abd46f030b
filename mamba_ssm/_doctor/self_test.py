"""The self-test: operators, forward and backward, on a small problem, beside their references in float64."""

import typing
from collections.abc import Callable, Sequence

import torch

from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
)
from mamba_ssm.ops.mamba3_scan import mamba3_scan, mamba3_scan_ref
from mamba_ssm.ops.norm import (
    gated_rms_norm_ref,
    layer_norm_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
    rmsnorm_fn,
)
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref
from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref

# float32 kernels on inputs of size about 1: rounding of a recurrence of 70 steps, and of approximate exponentials,
# stays below 1e-4 of the largest value.
_TOLERANCE = 1e-3
_Function = Callable[..., typing.Any]


def run(device: str, problems: list[str]) -> dict[str, dict[str, typing.Any]]:
    """Each test's result, by name, for the report."""
    results: dict[str, dict[str, typing.Any]] = {}
    for name, test in TESTS.items():
        try:
            error = test(device)
        except Exception as failure:
            results[name] = {"ok": False, "error": f"{type(failure).__name__}: {failure}"}
            problems.append(f"self-test of {name} on {device} failed: {failure}")
            continue
        results[name] = {"ok": error <= _TOLERANCE, "relative_error": error}
        if not error <= _TOLERANCE:  # not ">": NaN must fail
            problems.append(
                f"self-test of {name} on {device} is wrong: relative error {error:.1e}, expected "
                f"at most {_TOLERANCE:.0e}"
            )
    return results


def _relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.detach().cpu() - theirs.detach()).abs().max().item()
        error = difference / max(theirs.detach().abs().max().item(), 1e-6)
        if not error <= worst:  # keeps NaN
            worst = error
    return worst


def _inputs(shapes: Sequence[tuple[int, ...]], device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Normal tensors in float32 on the device, and the same in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    return [tensor.to(device, copy=True) for tensor in tensors], [tensor.double() for tensor in tensors]


def _with_gradients(function: _Function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        out = function(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out, *grads]


def _trained(ours: _Function, reference: _Function, shapes: Sequence[tuple[int, ...]], call: _Function) -> _Function:
    """A test of the output and of all gradients; call(function, *tensors) is the call."""

    def test(device: str) -> float:
        here, there = _inputs(shapes, device)
        found = _with_gradients(lambda *tensors: call(ours, *tensors), here)
        return _relative_error(found, _with_gradients(lambda *tensors: call(reference, *tensors), there))

    return test


def _stepped(ours: _Function, reference: _Function, shapes: Sequence[tuple[int, ...]], call: _Function) -> _Function:
    """A test of a decoding step: its output, and the state that it writes. call(function, state, *tensors)."""

    def test(device: str) -> float:
        here, there = _inputs(shapes, device)
        with torch.no_grad():
            return _relative_error([call(ours, *here), here[0]], [call(reference, *there), there[0]])

    return test


# ---- the calls: B 2, L 70 (37 of the convolution), D 24 or H 4 heads of P 8, N 16 ------------------------------------


def _scan(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    u, delta, A, B, C, D, z, bias = tensors
    return function(u, delta, -A.square(), B, C, D, z, bias, True)


def _chunk_scan(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    x, dt, A, B, C, D, z, bias = tensors
    return function(x, dt, -A.square(), B, C, 64, D=D, z=z, dt_bias=bias, dt_softplus=True)


def _mamba3_scan(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    Q, K, V, ADT, DT, *others = tensors
    return function(Q, K, V, -ADT.square(), DT.sigmoid(), *others)


def _conv(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    return function(*tensors, activation="silu")


def _conv_update(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    state, x, weight, bias = tensors
    return function(x, state, weight, bias, "silu")


def _state_update(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    state, x, dt, A, B, C, D, z, bias = tensors
    return function(state, x, dt, -A.square(), B, C, D, z, bias, True)


def _norm(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    x, residual, weight, bias = tensors
    return function(x, weight, bias, residual=residual)


def _gated_norm(function: _Function, *tensors: torch.Tensor) -> typing.Any:
    x, z, weight = tensors
    return function(x, weight, None, z=z)


_WIDE, _MATRIX = (2, 24, 70), (2, 16, 70)
_HEADS, _STEPS, _GROUPS = (2, 70, 4, 8), (2, 70, 4), (2, 70, 2, 16)
_RANKS = (2, 70, 1, 2, 16)
_ROWS = (2, 70, 24)
TESTS = {
    "selective_scan": _trained(
        selective_scan_fn, selective_scan_ref, [_WIDE, _WIDE, (24, 16), _MATRIX, _MATRIX, (24,), _WIDE, (24,)], _scan
    ),
    "mamba2_scan": _trained(
        mamba_chunk_scan_combined,
        ssd_chunk_scan_combined_ref,
        [_HEADS, _STEPS, (4,), _GROUPS, _GROUPS, (4,), _HEADS, (4,)],
        _chunk_scan,
    ),
    "mamba3_scan": _trained(
        mamba3_scan,
        mamba3_scan_ref,
        [_RANKS, _RANKS, _HEADS, _STEPS, _STEPS, _STEPS, (4, 1, 16), (4, 1, 16), (2, 70, 4), (4,), _HEADS],
        _mamba3_scan,
    ),
    "layer_norm": _trained(layer_norm_fn, layer_norm_ref, [_ROWS, _ROWS, (24,), (24,)], _norm),
    "rms_norm": _trained(rms_norm_fn, rms_norm_ref, [_ROWS, _ROWS, (24,), (24,)], _norm),
    "gated_rms_norm": _trained(rmsnorm_fn, gated_rms_norm_ref, [_ROWS, _ROWS, (24,)], _gated_norm),
    "causal_conv1d": _trained(causal_conv1d_fn, causal_conv1d_ref, [(2, 24, 37), (24, 4), (24,)], _conv),
    "causal_conv1d_update": _stepped(
        causal_conv1d_update, causal_conv1d_update_ref, [(2, 24, 4), (2, 24), (24, 4), (24,)], _conv_update
    ),
    "selective_state_update": _stepped(
        selective_state_update,
        selective_state_update_ref,
        [(2, 24, 16), (2, 24), (2, 24), (24, 16), (2, 16), (2, 16), (24,), (2, 24), (24,)],
        _state_update,
    ),
}
