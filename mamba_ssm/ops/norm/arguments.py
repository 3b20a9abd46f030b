"""What the norms' operators share: rows, parameters, and the gradients of weight and bias."""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import DTYPE_CODES, pointer


def check_rows(op, name, tensor):
    """Activations of one of the float dtypes with a last dimension.

    This and what follows run at every call, so comparisons come first and only a failure goes to what explains it.
    """
    if tensor.dtype in checks.FLOAT_DTYPES and tensor.dim():
        return
    checks.check_activation_dtype(op, name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least 1 dimension (..., N), got a scalar")


def check_parameters(op, x, weight, bias, weight_name="weight", bias_name="bias"):
    """weight and bias (N,) of any float dtype."""
    shape, device = x.shape[-1:], x.device
    if weight.shape != shape or weight.dtype not in checks.FLOAT_DTYPES or weight.device != device:
        checks.check_float(op, weight_name, weight, shape, x, "x", "(N,)")
    if bias is not None and (bias.shape != shape or bias.dtype not in checks.FLOAT_DTYPES or bias.device != device):
        checks.check_float(op, bias_name, bias, shape, x, "x", "(N,)")


def check_named_parameters(op, x, weight, bias, weight_name, bias_name):
    """For functions whose users know weight and bias by other names than the operator does."""
    checks.check_tensor(op, weight_name, weight)
    if bias is not None:
        checks.check_tensor(op, bias_name, bias)
    check_parameters(op, x, weight, bias, weight_name, bias_name)


def check_beside(op, name, tensor, x):
    """A second input like x, of x's dtype or float32."""
    if tensor.dtype == x.dtype and tensor.shape == x.shape and tensor.device == x.device:
        return
    if tensor.dtype != torch.float32:
        checks.check_same(op, name, tensor, x.shape, x, "x", "(..., N)")
    else:
        checks.check_float32(op, name, tensor, x.shape, x, "x", "(..., N)")


def in_rows(tensor):
    """(tensor, stride of its rows); made contiguous where the leading dimensions have no common stride."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    shape, strides = tensor.shape, tensor.stride()
    if strides[-1] == 1 or shape[-1] == 1:
        row_stride, expected = shape[-1], None
        for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
            if size == 1:
                continue
            if expected is None:
                row_stride = stride
            elif stride != expected:
                break
            expected = stride * size
        else:
            return tensor, row_stride
    return tensor.contiguous(), shape[-1]


def fill(params, rows, dtype, weight, bias, group_size, is_rms_norm, other_dtype):
    """Sizes, dtypes and parameters. weight and bias must be contiguous and outlive the call."""
    params.rows = rows
    params.ngroups = weight.shape[0] // group_size
    params.group_size = group_size
    params.is_rms_norm = is_rms_norm
    params.dtype = DTYPE_CODES[dtype]
    params.other_dtype = DTYPE_CODES[other_dtype]
    params.weight = weight.data_ptr()
    params.weight_dtype = DTYPE_CODES[weight.dtype]
    if bias is not None:
        params.bias = bias.data_ptr()
        params.bias_dtype = DTYPE_CODES[bias.dtype]


def allocate_statistics(x, groups, is_rms_norm, wanted):
    """mean and rstd (..., groups) for backward, or None."""
    if not wanted:
        return None, None
    shape = (*x.shape[:-1], groups)
    mean = None if is_rms_norm else x.new_empty(shape, dtype=torch.float32)
    return mean, x.new_empty(shape, dtype=torch.float32)


def check_statistics(op, x, groups, mean, rstd, is_rms_norm):
    shape = (*x.shape[:-1], groups)
    checks.check_float32(op, "rstd", rstd, shape, x, "x", "(..., groups)")
    if not is_rms_norm:
        if mean is None:
            raise ValueError(f"{op}: mean must be given unless is_rms_norm")
        checks.check_float32(op, "mean", mean, shape, x, "x", "(..., groups)")


def fill_gradients(params, functions, mean, rstd, dweight, dbias):
    """The statistics, and where dweight and dbias go. Returns the workspace, which must outlive the call."""
    params.mean = pointer(mean)
    params.rstd = rstd.data_ptr()
    params.dweight = dweight.data_ptr()
    params.dbias = pointer(dbias)
    size = functions["norm_backward_workspace"](params.forward)
    workspace = rstd.new_empty(size, dtype=torch.uint8) if size else None
    params.workspace = pointer(workspace)
    return workspace
