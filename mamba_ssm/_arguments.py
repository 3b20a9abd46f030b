"""Checks of what blocks and models are made with. config.json fills it in, so that it may be of any type."""

import numbers
import typing


def check_integer(owner: str, name: str, value: typing.Any, least: int = 1, most: float = float("inf")) -> None:
    """value is an integer, numpy's among them, from least to most. True, which Python counts as 1, is none."""
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or not least <= value <= most:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        if most < float("inf"):
            expected = f"an integer from {least} to {most}"
        raise ValueError(f"{owner}: {name} must be {expected}, got {value!r}")


def check_number(owner: str, name: str, value: typing.Any, least: float) -> None:
    """value is a finite number, numpy's among them, of at least least."""
    real = isinstance(value, numbers.Real)
    if not real or not least <= value < float("inf"):
        raise ValueError(f"{owner}: {name} must be a number of at least {least}, got {value!r}")


def check_range(owner: str, name: str, value: typing.Any) -> tuple[float, float]:
    """value is two numbers in order, which may be infinite; returns them as floats."""
    try:
        low, high = value
        words = isinstance(low, str) or isinstance(high, str)  # which float would read
        low, high = float(low), float(high)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        words = True
    if words or not low <= high:
        raise ValueError(f"{owner}: {name} must be (smallest, largest), got {value!r}")
    return low, high


def check_flags(owner: str, **flags: object) -> None:
    """Each is True or False, or 1 or 0. No words: "false" would count as true."""
    for name, value in flags.items():
        if value not in (True, False):
            raise ValueError(f"{owner}: {name} must be True or False (in JSON true or false, unquoted), got {value!r}")


def inner_width(owner: str, expand: float, d_model: int) -> int:
    """d_inner, the channels inside a block."""
    check_integer(owner, "d_model", d_model)
    check_number(owner, "expand", expand, least=0)
    d_inner = int(expand * d_model)
    if d_inner < 1:
        raise ValueError(f"{owner}: expand * d_model must be at least 1, got expand {expand!r} and d_model {d_model!r}")
    return d_inner
