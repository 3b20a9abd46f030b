"""Checks of what blocks and models are made with. config.json fills it in, so that it may be of any type."""

import numbers
import typing
from collections.abc import Sequence

import torch

LARGEST = 2**31 - 1  # of a size: kernels count with 32 bits
_LARGEST_NUMBER = torch.finfo(torch.float32).max
PARAMETER_DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


def shown(value: typing.Any) -> str:
    """value in an error: its repr, cut to 100 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deeply
        text = f"{'an integer' if isinstance(value, int) else type(value).__name__}, too long to show"
    return text if len(text) <= 100 else f"{text[:97]}..."


def first_few(items: Sequence[str]) -> str:
    """The first 5 items, which may come from a file, and how many more there are."""
    named = [item if item.isprintable() and len(item) <= 200 else shown(item) for item in items[:5]]
    return ", ".join(named) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def check_integer(owner: str, name: str, value: typing.Any, least: int = 1, most: float = LARGEST) -> None:
    """value is an integer, numpy's among them, from least to most. True, which Python counts as 1, is none."""
    most = min(most, LARGEST)
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or not least <= value <= most:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        if most < LARGEST or (integer and value > most):
            expected = f"an integer from {least} to {most}"
        raise ValueError(f"{owner}: {name} must be {expected}, got {shown(value)}")


def is_number(value: typing.Any) -> bool:
    """Whether value is a number, numpy's among them, that is finite in float32. True and False are none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return abs(float(value)) <= _LARGEST_NUMBER
    except OverflowError:  # an integer
        return False


def check_number(owner: str, name: str, value: typing.Any, least: float = float("-inf")) -> None:
    """value is_number, and at least least."""
    if not is_number(value) or value < least:
        expected = "a number" if least == float("-inf") else f"a number of at least {least}"
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if real and value >= least:
            expected += ", finite in float32"
        raise ValueError(f"{owner}: {name} must be {expected}, got {shown(value)}")


def check_range(owner: str, name: str, value: typing.Any) -> tuple[float, float]:
    """value is two numbers in order, which may be infinite; returns them as floats."""
    try:
        low, high = value
        words = isinstance(low, (str, bool)) or isinstance(high, (str, bool))  # which float would read
        low, high = float(low), float(high)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        words = True
    if words or not low <= high:
        raise ValueError(f"{owner}: {name} must be (smallest, largest), got {shown(value)}")
    return low, high


def check_flags(owner: str, **flags: object) -> None:
    """Each is True or False, or 1 or 0. No words: "false" would count as true."""
    for name, value in flags.items():
        if value not in (True, False):
            raise ValueError(
                f"{owner}: {name} must be True or False (in JSON true or false, unquoted), got {shown(value)}"
            )


def check_process_group(owner: str, group: typing.Any) -> None:
    """group is None or a process group of torch.distributed, which some builds of torch do not have."""
    if group is not None and not callable(getattr(group, "rank", None)):
        raise ValueError(f"{owner}: process_group must be a process group of torch.distributed, got {shown(group)}")


def inner_width(owner: str, expand: float, d_model: int) -> int:
    """d_inner, the channels inside a block."""
    check_integer(owner, "d_model", d_model)
    check_number(owner, "expand", expand, least=0)
    d_inner = int(expand * d_model)
    if not 1 <= d_inner <= LARGEST:
        raise ValueError(
            f"{owner}: expand * d_model must be from 1 to {LARGEST}, got expand {shown(expand)} and d_model {d_model}"
        )
    return d_inner


def parameter_dtype(owner: str, dtype: typing.Any) -> torch.dtype | None:
    """dtype, which may be given by name, such as "bfloat16" or "torch.bfloat16"; None stays None.

    Raises:
        ValueError: it is no dtype of parameters.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not any(found is known for known in PARAMETER_DTYPES):
        names = ", ".join(map(str, PARAMETER_DTYPES))
        raise ValueError(f'{owner}: dtype must be one of {names}, or its name, such as "bfloat16", got {shown(dtype)}')
    return found


def usable_device(owner: str, device: typing.Any) -> torch.device | None:
    """device as torch's own, on which a tensor can be made; None stays None.

    Raises:
        ValueError: it is no device. RuntimeError: torch cannot use it here.
    """
    if device is None:
        return None
    if not _is_device(device):
        meant_gpu = isinstance(device, str) and device.lower().startswith(("gpu", "nvidia", "cuda"))
        cure = '; did you mean "cuda"?' if meant_gpu else ""
        raise ValueError(
            f'{owner}: device must be a torch.device or its name, such as "cpu", "cuda" or "cuda:1", '
            f"got {shown(device)}{cure}"
        )
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch has several, AssertionError among them
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".")
        raise RuntimeError(
            f"{owner}: torch cannot use the device {str(device)!r} here ({reason}). `python -m mamba_ssm` says what "
            'this machine has; device="cpu" works everywhere'
        ) from error


def _is_device(device: typing.Any) -> bool:
    if isinstance(device, int):  # of the accelerator, which may be missing
        return not isinstance(device, bool) and device >= 0
    try:
        torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
