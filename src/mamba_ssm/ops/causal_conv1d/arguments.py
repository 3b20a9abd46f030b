"""Checks and layout shared by the convolution's operators."""

from mamba_ssm.ops._shared import checks


def wants_silu(op, activation):
    """True for silu, False for none."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return activation is not None


def check_width(op, width, name="weight"):
    """The kernels have code for these. name: of the tensor whose last dimension it is."""
    if not 2 <= width <= 4:
        raise ValueError(f"{op}: the width (last dimension of {name}) must be 2, 3 or 4, got {width}")


def check_weight(op, x, dim, weight, bias, x_name="x", prefix=""):
    """Checks weight (D, W) and bias (D); returns W. x_name, prefix: of the names that the caller's user knows."""
    checks.check_dims(op, f"{prefix}weight", weight, 2, "(D, W)")
    width = weight.shape[1]
    check_width(op, width, f"{prefix}weight")
    checks.check_float(op, f"{prefix}weight", weight, (dim, width), x, x_name, "(D, W)")
    if bias is not None:
        checks.check_float(op, f"{prefix}bias", bias, (dim,), x, x_name, "(D,)")
    return width


def kernel_layout(x):
    """x as it is if its length or its channels have stride 1, else contiguous."""
    _, dim_stride, len_stride = x.stride()
    return x if len_stride == 1 or dim_stride == 1 else x.contiguous()
