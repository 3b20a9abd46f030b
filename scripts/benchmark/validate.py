"""The rule that a result must pass before it is timed."""

import math

import torch

# Root mean square of the error over that of the reference. Rounding a result to bfloat16 alone gives 0.0017, to float16
# 0.0002; float32 arithmetic over thousands of steps stays below 1e-5.
RMS_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 3e-5}
# Largest error of one element over |reference| + the root mean square of its row (the last dimension: rows with a step
# size of their own differ by orders of magnitude), for few elements. Where each of n elements has a normal error that
# spreads by RMS_LIMIT, the largest is about sqrt(2 ln n) times that (2e7: 5.8).
ELEMENT_LIMIT = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}


class Mismatch(Exception):
    """A result differs from its reference by more than rounding explains."""


def _check_shape(name, got, expected):
    if got.shape != expected.shape:
        raise Mismatch(f"{name}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")


def check(name, got, expected, dtype, factor=1.0):
    """Raise Mismatch unless got, computed in dtype, agrees with the float64 reference.

    factor: by how much its errors may exceed those of one rounding and of sums that do not cancel.
    """
    got, expected = got.detach(), expected.detach().double()
    _check_shape(name, got, expected)
    error = (got.double() - expected).abs_()
    scale = expected.square().mean().sqrt()
    rms = float(error.square().mean().sqrt() / scale)
    row = torch.maximum(expected.square().mean(-1, keepdim=True).sqrt(), scale) if expected.dim() else scale
    worst = float((error / (expected.abs() + row)).max())
    rms_limit = factor * RMS_LIMIT[dtype]
    element_limit = max(factor * ELEMENT_LIMIT[dtype], rms_limit * math.sqrt(2 * math.log(error.numel())))
    if not (rms <= rms_limit and worst <= element_limit):
        raise Mismatch(
            f"{name}: rms error {rms:.2e} (limit {rms_limit:.0e}), largest {worst:.2e} (limit {element_limit:.1e})"
        )


def check_roughly(name, got, expected, limit):
    """For what passes through layers, or rounds as another package likes: the error's norm over the result's."""
    got, expected = got.detach().double(), expected.detach().double()
    _check_shape(name, got, expected)
    error = float((got - expected).norm() / expected.norm())
    if not error <= limit:
        raise Mismatch(f"{name}: relative error {error:.2e} (limit {limit:.0e})")
