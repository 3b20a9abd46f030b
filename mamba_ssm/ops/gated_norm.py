"""LayerNorm and RMSNorm with a gate, silu(z), and groups: the norm at the end of a Mamba-2 layer."""

import torch

from mamba_ssm.ops.norm_reference import gated_norm_ref


def layernorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """LayerNorm (or RMSNorm) over groups of neighbours in the last dimension, times silu(z).

    Args (float32, float16 or bfloat16 each):
        x: (..., N). z: like x, or None for no gate.
        weight: (N). bias: (N), or None.
        group_size: elements that are normalised together, a divisor of N; None for all N.
        norm_before_gate: norm(x) * silu(z), else norm(x * silu(z)).
        is_rms_norm: RMSNorm instead of LayerNorm.

    Returns:
        out of x's shape and dtype.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape or device is wrong.

    Same as upstream's mamba_ssm.ops.triton.layernorm_gated.layernorm_fn.
    """
    return gated_norm_ref(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=is_rms_norm)


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """layernorm_fn with is_rms_norm=True.

    Same as upstream's mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn.
    """
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class _GatedNorm(torch.nn.Module):
    """What the two modules share: weight (hidden_size), ones at first, and the options."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class LayerNorm(_GatedNorm):
    """layernorm_fn with parameters weight and bias (hidden_size)."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, x, z=None):
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(_GatedNorm):
    """rmsnorm_fn with parameter weight (hidden_size); there is no bias."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x, z=None):
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)
