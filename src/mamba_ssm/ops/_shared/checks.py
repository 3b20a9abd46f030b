"""Argument checks shared by the operators: each failure names the argument, what was expected and what came."""

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def short(dtype):
    """torch.float32 -> "float32"."""
    return str(dtype).replace("torch.", "")


def check_activation_dtype(op, name, tensor):
    """Activations are float32, float16 or bfloat16."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, float16 or bfloat16, got {_dtype_advice(tensor.dtype)}")


def check_same(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, and dtype and device of like (the argument called like_name)."""
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {_dtype_advice(tensor.dtype)}"
        )
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_float32(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is float32 and on the device of like."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be float32, got {_dtype_advice(tensor.dtype)}")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_float(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is float32, float16 or bfloat16, and on the device of like."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, float16 or bfloat16, got {_dtype_advice(tensor.dtype)}")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_int32(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is int32 and on the device of like."""
    if tensor.dtype != torch.int32:
        raise TypeError(f"{op}: {name} must be int32, got {short(tensor.dtype)}")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_index(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is int32 or int64 and on the device of like."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {short(tensor.dtype)}")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_tensor(op, name, value):
    """value is a tensor. For functions that look at an argument before its operator's own checks do."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")


def check_writable(op, name, tensor):
    """No two elements of a tensor that is written in place share memory: each stride reaches past what the smaller ones
    cover. (Strides such as (3, 2) of shape (2, 3) interleave without sharing; they are refused too.)
    """
    if tensor.is_contiguous():
        return
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < covered:
            raise ValueError(
                f"{op}: {name} is written in place, but its elements share memory (strides {tensor.stride()}): "
                "use .clone() where it was expanded, unfolded or made by as_strided"
            )
        covered += (size - 1) * stride


def check_dims(op, name, tensor, dims, letters):
    """tensor has this many dimensions."""
    check_tensor(op, name, tensor)
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {name} must have {dims} dimensions {letters}, got shape {tuple(tensor.shape)}")


def check_dstate(op, dstate, largest):
    """The kernels hold at most so many states a channel."""
    if not 1 <= dstate <= largest:
        raise ValueError(f"{op}: dstate (the last dimension of A) must lie in 1..{largest}, got {dstate}")


def check_bounds(op, bounds, length):
    """The values of cu_seqlens. For the CPU: looking at them on a GPU would be a synchronisation."""
    if bounds[0] != 0 or bounds[-1] > length or bounds != sorted(bounds):
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to at most the {length} steps of x, got {bounds}")


def check_groups(op, channels_name, channels, groups):
    """Groups of B and C divide the channels or heads evenly."""
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{op}: {channels_name} must be a multiple of the number of groups of B and C, got {groups} groups"
        )


def widen(tensor):
    """float32 of a parameter that came as float16 or bfloat16; others go on unchanged, to be checked later."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def cast(tensor, dtype):
    """tensor in another float dtype; what is no float tensor goes on unchanged, to be checked later."""
    return tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype in FLOAT_DTYPES else tensor


def no_complex(op, name, tensor):
    """Upstream's complex state matrices are out of scope; say so before anything else fails on them."""
    if tensor.dtype in (torch.complex64, torch.complex128, torch.complex32):
        raise TypeError(f"{op}: {name} must be a real float32 tensor, got {_dtype_advice(tensor.dtype)}")


def unit_last_stride(tensor):
    """The kernels step through the last dimension with stride 1."""
    if tensor is None or tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def contiguous(tensor):
    """tensor or None, contiguous."""
    return None if tensor is None else tensor.contiguous()


def _dtype_advice(dtype):
    if dtype.is_complex:
        return f"{short(dtype)} (complex states are not supported)"
    if dtype == torch.float64:
        return "float64 (convert it with .float())"
    return short(dtype)


def _shape_error(op, name, tensor, shape, letters):
    return ValueError(f"{op}: {name} must have shape {letters} = {tuple(shape)}, got {tuple(tensor.shape)}")


def _device_error(op, name, tensor, like, like_name):
    return ValueError(f"{op}: {name} must be on {like.device} like {like_name}, got {tensor.device}")
