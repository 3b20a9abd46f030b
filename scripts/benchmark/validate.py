"""References in float64, and the rule that a result must pass before it is timed."""

import math

import torch
import torch.nn.functional as F

# Root mean square of the error over that of the reference. Rounding a result to bfloat16 alone gives 0.0017, to float16
# 0.0002; float32 arithmetic over thousands of steps stays below 1e-5.
RMS_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 3e-5}
# Largest error of one element over |reference| + the root mean square of its row (the last dimension: rows with a step
# size of their own differ by orders of magnitude), for few elements. Where each of n elements has a normal error that
# spreads by RMS_LIMIT, the largest is about sqrt(2 ln n) times that (2e7: 5.8).
ELEMENT_LIMIT = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}


class Mismatch(Exception):
    """A result differs from its reference by more than rounding explains."""


def check(name, got, expected, dtype):
    """Raise Mismatch unless got, computed in dtype, agrees with the float64 reference."""
    got, expected = got.detach(), expected.detach().double()
    error = (got.double() - expected).abs_()
    scale = expected.square().mean().sqrt()
    rms = float(error.square().mean().sqrt() / scale)
    row = torch.maximum(expected.square().mean(-1, keepdim=True).sqrt(), scale) if expected.dim() else scale
    worst = float((error / (expected.abs() + row)).max())
    element_limit = max(ELEMENT_LIMIT[dtype], RMS_LIMIT[dtype] * math.sqrt(2 * math.log(error.numel())))
    if not (rms <= RMS_LIMIT[dtype] and worst <= element_limit):
        raise Mismatch(
            f"{name}: rms error {rms:.2e} (limit {RMS_LIMIT[dtype]:.0e}), largest {worst:.2e} "
            f"(limit {element_limit:.1e})"
        )


def linear_recurrence(a, b):
    """h_t = a_t h_{t-1} + b_t along the last dimension, by doubling: no loop over time. Overwrites a and b."""
    seqlen, shift = a.shape[-1], 1
    while shift < seqlen:
        b[..., shift:] += a[..., shift:] * b[..., :-shift].clone()
        a[..., shift:] *= a[..., :-shift].clone()
        shift *= 2
    return b


def scan_and_gradients(inputs, dout, row, elements=1 << 27):
    """The scan of batch entry `row` in float64 with softplus, and its gradients for dout: {name: tensor}.

    Channels go through in groups of at most `elements` states.
    """
    u, delta, z, dout = (tensor[row].double() for tensor in (inputs["u"], inputs["delta"], inputs["z"], dout))
    B, C = inputs["B"][row].double(), inputs["C"][row].double()
    A, D, bias = (inputs[name].double() for name in ("A", "D", "delta_bias"))
    dim, seqlen = u.shape
    results = {name: torch.empty_like(u) for name in ("out", "u", "delta", "z")}
    results.update(A=torch.empty_like(A), B=torch.zeros_like(B), C=torch.zeros_like(C))
    results.update(D=torch.empty_like(D), delta_bias=torch.empty_like(bias))
    step = max(1, elements // (seqlen * A.shape[1]))
    for first in range(0, dim, step):
        part = slice(first, first + step)
        raw = delta[part] + bias[part, None]
        dt, gate = F.softplus(raw, threshold=60.0), torch.sigmoid(z[part])
        decay = torch.exp(dt[:, None] * A[part, :, None])
        h = linear_recurrence(decay.clone(), (dt * u[part])[:, None] * B)
        y = (h * C).sum(1) + D[part, None] * u[part]
        results["out"][part] = y * z[part] * gate
        results["z"][part] = dout[part] * y * gate * (1 + z[part] * (1 - gate))
        dy = dout[part] * z[part] * gate
        results["C"] += (dy[:, None] * h).sum(0)
        # the gradient with respect to h_t runs backwards through the decay of step t + 1
        later = torch.cat([decay[..., 1:], torch.zeros_like(decay[..., :1])], -1).flip(-1)
        g = linear_recurrence(later, (dy[:, None] * C).flip(-1)).flip(-1)
        results["B"] += (g * (dt * u[part])[:, None]).sum(0)
        through_B = (g * B).sum(1)
        before = torch.cat([torch.zeros_like(h[..., :1]), h[..., :-1]], -1)
        through_decay = g * before * decay
        results["A"][part] = (through_decay * dt[:, None]).sum(-1)
        ddt = (through_decay * A[part, :, None]).sum(1) + through_B * u[part]
        results["u"][part] = D[part, None] * dy + through_B * dt
        results["delta"][part] = ddt * torch.sigmoid(raw)
        results["D"][part] = (dy * u[part]).sum(-1)
        results["delta_bias"][part] = results["delta"][part].sum(-1)
    return results
