"""From a kernel library's error code to a Python exception with a cure."""

import sys
from collections.abc import Iterable

from mamba_ssm._native import abi
from mamba_ssm._native.advice import driver_needed, with_variables


class NativeError(RuntimeError):
    """A kernel library could not be loaded, or a kernel failed. The message holds the cause and the cure."""


def shell_command(command: str, **variables: str) -> str:
    """A command with environment variables set, as this system's users type it."""
    return with_variables(sys.platform, command, **variables)


def cuda_version_text(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_problem(driver_version: int, runtime_version: int) -> str | None:
    """Why the installed driver cannot run a library made with this CUDA runtime, with the cure; None if it can.

    Both versions are CUDA's numbers, e.g. 12040 and 13000; a driver_version of 0 means that there is no driver.
    """
    major = runtime_version // 1000
    built = f"this mamba_ssm was built with CUDA {cuda_version_text(runtime_version)}"
    wheel = f"{built} and needs {driver_needed(major)}"
    if driver_version == 0:
        return f"no NVIDIA driver was found; {wheel}. Install the driver (nvidia-smi must list a GPU)."
    if driver_version // 1000 < major:
        return (
            f"the installed NVIDIA driver supports CUDA {cuda_version_text(driver_version)}; {wheel}. "
            f"Update the driver, or install a wheel built with CUDA {driver_version // 1000}.x "
            f"(label +cu{driver_version // 1000}x)."
        )
    return None


def architecture_problem(capability: tuple[int, int], architectures: Iterable[str]) -> str | None:
    """Why a GPU of this (major, minor) capability cannot run code built for these CMake architectures; None if it can.

    Real code runs on GPUs of its major version from its minor version on ("90a" only on exactly that), PTX ("-virtual")
    on its own and every later capability.
    """
    for spelled in architectures:
        name, _, kind = str(spelled).partition("-")
        specific = name[-1:] if name[-1:].isalpha() else ""
        digits = name.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            return None  # "native", "all": nothing can be said
        wanted = (int(digits[:-1]), int(digits[-1]))
        if specific == "a":
            runs = capability == wanted
        elif specific:
            runs = capability[0] == wanted[0] and capability >= wanted
        else:
            runs = kind != "virtual" and capability[0] == wanted[0] and capability >= wanted
            runs = runs or (kind != "real" and capability >= wanted)
        if runs:
            return None
    major, minor = capability
    held = ", ".join(str(spelled) for spelled in architectures) or "none"
    build = shell_command("pip wheel --no-deps -w dist .", TORCH_CUDA_ARCH_LIST=f"{major}.{minor}")
    return (
        f"the GPU's architecture is sm_{major}{minor} (compute capability {major}.{minor}), and this wheel holds code "
        f"for {held}. Build one that does: `{build}` in the source tree, then install it."
    )


def exception_for(code: int, message: str, where: str) -> Exception:
    """The exception to raise for an error code with the library's own message, which may begin with where it failed."""
    message = message.removeprefix(f"{where}: ")
    if code == abi.ERROR_INVALID:
        return ValueError(f"{where}: {message}")
    if code == abi.ERROR_UNSUPPORTED:
        return NotImplementedError(f"{where}: {message}")
    if code == abi.ERROR_INDEX:
        return IndexError(f"{where}: {message}")
    if code == abi.ERROR_MEMORY:
        return MemoryError(f"{where}: {message}")
    if code == abi.ERROR_NO_KERNEL_IMAGE:
        message += (
            ". This mamba_ssm holds no code for this GPU: `python -m mamba_ssm` compares it with the wheel's. "
            "Build a wheel with TORCH_CUDA_ARCH_LIST set to the GPU's compute capability"
        )
    elif code == abi.ERROR_DRIVER:
        message += ". `python -m mamba_ssm` compares the driver found with the one that this mamba_ssm needs"
    elif code not in (abi.ERROR_CUDA, abi.ERROR_DTYPE_DISABLED):
        message += f" (error code {code})"
    return NativeError(f"{where}: {message}")
