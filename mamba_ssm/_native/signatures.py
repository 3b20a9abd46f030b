"""The functions of csrc/include/mamba_kernels.h in ctypes: what each takes and returns."""

import ctypes
import typing
from collections.abc import Callable

from mamba_ssm._native import abi

# A library's functions: {name without mamba_: ctypes function}.
Functions = dict[str, Callable[..., typing.Any]]

# Functions that return a code, by their first argument, and what they take besides.
FUNCTIONS = {
    "library_info": abi.MambaLibraryInfo,
    "selective_scan_forward": abi.MambaSelectiveScan,
    "selective_scan_backward": abi.MambaSelectiveScanBackward,
    "selective_scan_forward_carry": abi.MambaSelectiveScan,
    "selective_scan_backward_carry": abi.MambaSelectiveScanBackward,
    "causal_conv1d_forward": abi.MambaCausalConv1d,
    "causal_conv1d_backward": abi.MambaCausalConv1dBackward,
    "causal_conv1d_update": abi.MambaCausalConv1dUpdate,
    "selective_state_update": abi.MambaSelectiveStateUpdate,
    "mamba2_step": abi.MambaMamba2Step,
    "mamba_step": abi.MambaMambaStep,
    "linear": abi.MambaLinear,
    "selective_scan_plan": abi.MambaSelectiveScan,
    "ssd_forward": abi.MambaSsd,
    "ssd_backward": abi.MambaSsdBackward,
    "ssd_carry": abi.MambaSsdCarry,
    "mamba3_forward": abi.MambaMamba3,
    "mamba3_backward": abi.MambaMamba3Backward,
    "mamba3_step": abi.MambaMamba3Step,
    "mamba3_inputs_forward": abi.MambaMamba3Inputs,
    "mamba3_inputs_backward": abi.MambaMamba3InputsBackward,
    "norm_forward": abi.MambaNorm,
    "norm_backward": abi.MambaNormBackward,
    "swiglu_forward": abi.MambaSwiglu,
    "swiglu_backward": abi.MambaSwiglu,
}
MORE_ARGUMENTS = {"selective_scan_plan": [ctypes.c_int32, ctypes.POINTER(abi.MambaSelectiveScanPlan)]}
# Functions that return a size in bytes.
SIZE_FUNCTIONS = {
    "causal_conv1d_backward_workspace": abi.MambaCausalConv1d,
    "mamba_step_workspace": abi.MambaMambaStep,
    "ssd_forward_workspace": abi.MambaSsd,
    "ssd_backward_workspace": abi.MambaSsd,
    "mamba3_forward_workspace": abi.MambaMamba3,
    "mamba3_backward_workspace": abi.MambaMamba3,
    "mamba3_inputs_backward_workspace": abi.MambaMamba3Inputs,
    "norm_backward_workspace": abi.MambaNorm,
}


def bind(library: ctypes.CDLL) -> Functions:
    """Declares every function of an opened ctypes library; returns them by name.

    Raises AttributeError if the library lacks one.
    """
    bound = {}
    for name, struct in FUNCTIONS.items():
        function = getattr(library, "mamba_" + name)
        function.argtypes = [ctypes.POINTER(struct), *MORE_ARGUMENTS.get(name, [])]
        function.restype = ctypes.c_int32
        bound[name] = function
    for name, struct in SIZE_FUNCTIONS.items():
        function = getattr(library, "mamba_" + name)
        function.argtypes = [ctypes.POINTER(struct)]
        function.restype = ctypes.c_int64
        bound[name] = function
    library.mamba_struct_size.argtypes = [ctypes.c_char_p]
    library.mamba_struct_size.restype = ctypes.c_int64
    library.mamba_last_error.argtypes = []
    library.mamba_last_error.restype = ctypes.c_char_p
    bound["struct_size"] = library.mamba_struct_size
    bound["last_error"] = library.mamba_last_error
    return bound
