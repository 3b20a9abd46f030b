"""Argument checks shared by the operators: each failure names the argument, what was expected and what came."""

import operator

import torch

from mamba_ssm._torch import refuse_what_is_no_dense_tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def short(dtype):
    """torch.float32 -> "float32"."""
    return str(dtype).replace("torch.", "")


def check_activation_dtype(op, name, tensor):
    """Activations are float32, float16 or bfloat16."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise _dtype_error(op, name, tensor, "float32, float16 or bfloat16")


def check_same(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, and dtype and device of like (the argument called like_name)."""
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.dtype != like.dtype:
        check_tensor(op, name, tensor)
        raise TypeError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {_dtype_advice(tensor.dtype)}"
        )
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_devices(op, like_name, like, **tensors):
    """Each tensor, or None, is on like's device. For references: torch multiplies a meta tensor by one of the CPU, and
    copies to one, without an error.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != like.device:
            raise _device_error(op, name, tensor, like, like_name)


def cure_of_devices(layer_is_meta, input_is_meta):
    """What to do where a layer and its input are on two devices."""
    if layer_is_meta:
        return "the layer holds no data; call .to_empty(device=...) and load its weights"
    if input_is_meta:
        return "the input holds no data; make it on the layer's device"
    return "move the input or the layer with .to(device)"


def check_is(op, name, tensor, dtype, shape, like, like_name, letters):
    """tensor has this dtype and shape, and is on the device of like."""
    if tensor.dtype != dtype:
        raise _dtype_error(op, name, tensor, short(dtype))
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_float32(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is float32 and on the device of like."""
    check_is(op, name, tensor, torch.float32, shape, like, like_name, letters)


def check_float(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is float32, float16 or bfloat16, and on the device of like."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise _dtype_error(op, name, tensor, "float32, float16 or bfloat16")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_int32(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is int32 and on the device of like."""
    check_is(op, name, tensor, torch.int32, shape, like, like_name, letters)


def check_index(op, name, tensor, shape, like, like_name, letters):
    """tensor has this shape, is int32 or int64 and on the device of like."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise _dtype_error(op, name, tensor, "int32 or int64")
    if tensor.shape != shape:
        raise _shape_error(op, name, tensor, shape, letters)
    if tensor.device != like.device:
        raise _device_error(op, name, tensor, like, like_name)


def check_tensor(op, name, value):
    """value is a dense tensor. For functions that look at an argument before its operator does."""
    if value is None:
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got NoneType")
    dense = type(value) is torch.Tensor and value.layout is torch.strided
    if not dense or value.is_nested or value.is_quantized:
        refuse_what_is_no_dense_tensor(op, {name: value})


def check_number(op, name, value):
    """value as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}") from None


def check_integer(op, name, value):
    """value as an int of 64 bits (True is none); a size that a compiler keeps open stays as it is."""
    if isinstance(value, torch.SymInt):
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {name} must be an integer of 64 bits, got {value!r}")
    return number


def check_writable(op, name, tensor):
    """No two elements of a tensor that is written in place share memory: each stride reaches past what the smaller ones
    cover. (Strides such as (3, 2) of shape (2, 3) interleave without sharing; they are refused too.)
    """
    if tensor.is_contiguous():
        return
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < covered:
            check_tensor(op, name, tensor)  # a sparse one has strides of 0
            raise ValueError(
                f"{op}: {name} is written in place, but its elements share memory (strides {tensor.stride()}): "
                "use .clone() where it was expanded, unfolded or made by as_strided"
            )
        covered += (size - 1) * stride


def into(op, name, target, value):
    """value, in the memory of target if that is given."""
    if target is None or value is None:
        return value
    check_tensor(op, name, target)
    if target.shape != value.shape:
        raise ValueError(f"{op}: {name} must have shape {tuple(value.shape)}, got {tuple(target.shape)}")
    if target.device != value.device:
        raise ValueError(f"{op}: {name} must be on {value.device}, got {target.device}")
    check_writable(op, name, target)
    return target.copy_(value)


def check_dims(op, name, tensor, dims, letters):
    """tensor has this many dimensions."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
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
            f"{op}: {channels_name} must be a multiple of the number of groups of B and C, ngroups, got {groups} groups"
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
    """Kernels have no complex states, nor has plain torch but for the selective scan; say so before anything else fails
    on them.
    """
    if tensor.dtype in (torch.complex64, torch.complex128, torch.complex32):
        raise _dtype_error(op, name, tensor, "a real float32 tensor")


def unit_last_stride(tensor):
    """The kernels step through the last dimension with stride 1."""
    if tensor is None or tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def all_contiguous(tensors):
    """Whether there is nothing to copy for kernels: the usual case of a small call."""
    for tensor in tensors:  # noqa: SIM110  (a generator takes twice as long)
        if tensor is not None and not tensor.is_contiguous():
            return False
    return True


def contiguous(tensor):
    """tensor or None, contiguous."""
    return None if tensor is None else tensor.contiguous()


def _dtype_advice(dtype):
    if dtype.is_complex:
        return f"{short(dtype)} (complex states are not supported)"
    if dtype == torch.float64:
        return "float64 (convert it with .float())"
    return short(dtype)


def _dtype_error(op, name, tensor, expected):
    check_tensor(op, name, tensor)  # an array of numpy has a dtype too, and a sparse tensor a shape
    return TypeError(f"{op}: {name} must be {expected}, got {_dtype_advice(tensor.dtype)}")


def _shape_error(op, name, tensor, shape, letters):
    check_tensor(op, name, tensor)
    return ValueError(f"{op}: {name} must have shape {letters} = {tuple(shape)}, got {tuple(tensor.shape)}")


def _device_error(op, name, tensor, like, like_name):
    return ValueError(f"{op}: {name} must be on {like.device} like {like_name}, got {tensor.device}")
