"""Runs one native function on the device, stream and threads of a tensor. On the hot path of every call."""

import typing

import torch

from mamba_ssm._native import abi, loader, signatures
from mamba_ssm._native.errors import exception_for
from mamba_ssm._torch import current_stream, note_call

DTYPE_CODES = {torch.float32: abi.FLOAT32, torch.float16: abi.FLOAT16, torch.bfloat16: abi.BFLOAT16}

_cpu = loader.libraries
_cuda = loader.ready_cuda_devices


class View:
    """A part of a tensor as kernels see it: address, strides and dtype. It must not outlive the tensor.

    For operators that hand many parts to kernels: a view that is a tensor costs several times as much.
    """

    __slots__ = ("address", "dtype", "strides")

    def __init__(self, tensor: torch.Tensor, offset: int, *strides: int) -> None:
        self.address = tensor.data_ptr() + offset * tensor.element_size()
        self.dtype = tensor.dtype
        self.strides = strides

    def data_ptr(self) -> int:
        return self.address

    def dim(self) -> int:
        return len(self.strides)

    def stride(self) -> tuple[int, ...]:
        return self.strides


def backwards(tensor: torch.Tensor | View, dim: int, length: int) -> View:
    """The same elements with this dimension, of so many, the other way round: by a negative stride, not by a copy."""
    strides = list(tensor.stride())
    view = View.__new__(View)
    view.address = tensor.data_ptr() + (length - 1) * strides[dim] * tensor.dtype.itemsize
    strides[dim] = -strides[dim]
    view.dtype, view.strides = tensor.dtype, tuple(strides)
    return view


def place(params: typing.Any, tensor: torch.Tensor) -> signatures.Functions:
    """Fills in where to run and returns the functions of the library that runs there."""
    index = tensor.get_device()
    if index >= 0:
        functions = _cuda.get(index) or loader.cuda_functions(index)
        params.stream = current_stream(index)
        params.device = index
    else:
        functions = _cpu.get("cpu") or loader.load("cpu")
        params.num_threads = torch.get_num_threads()
    return functions


def run(functions: signatures.Functions, name: str, params: typing.Any) -> None:
    """Calls a native function that does something; raises what its error code stands for."""
    check(functions, name, functions[name](params))
    note_call(functions, name, params, check)


def ask(functions: signatures.Functions, name: str, *arguments: typing.Any) -> None:
    """The same of a function that only answers."""
    check(functions, name, functions[name](*arguments))


def check(functions: signatures.Functions, name: str, code: int) -> None:
    """Raises what this function's error code stands for."""
    if code:
        raise exception_for(code, functions["last_error"]().decode(errors="replace"), name)


def pointer(tensor: torch.Tensor | View | None) -> int | None:
    """Address of a tensor, None for None."""
    return None if tensor is None else tensor.data_ptr()
