"""Writes native/self_test_values.h, what the self-test expects: python scripts/windows_gate/reference_values.py

The values are those of the plain torch references in float64; inputs are made by the formula of native/self_test.c.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = HERE / "native" / "self_test_values.h"
SAMPLES = 12


def made(seed: int, *shape: int):
    """The inputs: -1 to 1, float32 values held in float64."""
    import torch

    count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    value = ((count * 7919 + seed * 104729) % 2003).double() / 1001.0 - 1.0
    return value.float().double().reshape(shape)


def sample(tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)
    last = flat.numel() - 1
    return [float(flat[k * last // (SAMPLES - 1)]) for k in range(SAMPLES)]


def scan() -> dict:
    from mamba_ssm.ops.selective_scan.reference import selective_scan_ref

    inputs = {
        "u": made(1, 2, 20, 70),
        "delta": made(2, 2, 20, 70),
        "A": made(3, 20, 5) - 1.5,
        "B": made(4, 2, 2, 5, 70),
        "C": made(5, 2, 2, 5, 70),
        "D": made(6, 20),
        "z": made(7, 2, 20, 70),
        "delta_bias": made(8, 20),
        "initial_state": made(9, 2, 20, 5),
    }
    for tensor in inputs.values():
        tensor.requires_grad_()
    out, last_state = selective_scan_ref(**inputs, delta_softplus=True, return_last_state=True)
    ((out * made(10, 2, 20, 70)).sum() + (last_state * made(11, 2, 20, 5)).sum()).backward()
    gradients = {f"scan_d{name}": tensor.grad for name, tensor in inputs.items()}
    return {"scan_out": out, "scan_last_state": last_state, **gradients}


def conv() -> dict:
    from mamba_ssm.ops.causal_conv1d import causal_conv1d_ref, causal_conv1d_update_ref

    x, weight, bias = made(21, 2, 20, 37), made(22, 20, 4), made(23, 20)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    out = causal_conv1d_ref(x, weight, bias, activation="silu")
    (out * made(24, 2, 20, 37)).sum().backward()
    gradients = {"conv_dx": x.grad, "conv_dweight": weight.grad, "conv_dbias": bias.grad}
    state = made(26, 2, 20, 3)
    updated = causal_conv1d_update_ref(made(25, 2, 20), state, weight.detach(), bias.detach(), activation="silu")
    return {"conv_out": out, **gradients, "conv_update_out": updated, "conv_update_state": state}


def state_update() -> dict:
    from mamba_ssm.ops.state_update import selective_state_update_ref

    state = made(31, 3, 2, 20, 16)
    dt, A, D, dt_bias = made(33, 3, 2, 20), made(34, 2, 20, 16) - 1.5, made(37, 2, 20), made(39, 2, 20)
    x, B, C, z = made(32, 3, 2, 20), made(35, 3, 1, 16), made(36, 3, 1, 16), made(38, 3, 2, 20)
    out = selective_state_update_ref(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus=True)
    return {"update_out": out, "update_state": state}


def ssd() -> dict:
    from mamba_ssm.ops.ssd.reference import ssd_chunk_scan_combined_ref

    inputs = {
        "x": made(41, 2, 70, 4, 20),
        "dt": made(42, 2, 70, 4),
        "A": made(43, 4) - 1.5,
        "B": made(44, 2, 70, 2, 5),
        "C": made(45, 2, 70, 2, 5),
        "D": made(46, 4),
        "dt_bias": made(47, 4),
        "initial_states": made(48, 2, 4, 20, 5),
    }
    for tensor in inputs.values():
        tensor.requires_grad_()
    out, state = ssd_chunk_scan_combined_ref(**inputs, chunk_size=64, dt_softplus=True, return_final_states=True)
    ((out * made(49, 2, 70, 4, 20)).sum() + (state * made(50, 2, 4, 20, 5)).sum()).backward()
    return {"ssd_out": out, "ssd_final_state": state, **{f"ssd_d{name}": value.grad for name, value in inputs.items()}}


def norm() -> dict:
    from mamba_ssm.ops.norm import gated_rms_norm_ref, swiglu_ref

    x, weight, z = made(61, 6, 40), made(62, 40), made(63, 6, 40)
    xy = made(65, 6, 40)
    for tensor in (x, weight, z, xy):
        tensor.requires_grad_()
    out = gated_rms_norm_ref(x, weight, None, z, eps=1e-5, group_size=20, norm_before_gate=False)
    gate = swiglu_ref(xy)
    ((out * made(64, 6, 40)).sum() + (gate * made(66, 6, 20)).sum()).backward()
    norm = {"norm_out": out, "norm_dx": x.grad, "norm_dweight": weight.grad, "norm_dz": z.grad}
    return {**norm, "swiglu_out": gate, "swiglu_dxy": xy.grad}


def header() -> str:
    lines = [
        "// What the plain torch references give in float64 for the inputs of self_test.c. From reference_values.py.",
        "#pragma once",
        "",
        f"#define SAMPLES {SAMPLES} /* of each result, the first, the last, and evenly in between */",
    ]
    for name, tensor in {**scan(), **conv(), **state_update(), **ssd(), **norm()}.items():
        values = [f"{value:.9e}" for value in sample(tensor)]
        lines += ["", f"static const double {name}[SAMPLES] = {{"]
        lines += [f"    {', '.join(values[at : at + 4])}," for at in range(0, SAMPLES, 4)]
        lines += ["};"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    HEADER.write_text(header(), encoding="utf-8", newline="\n")
