"""Checks of what blocks and models are made with. config.json fills it in, so that it may be of any type."""

import numbers


def check_integer(owner, name, value, least=1, most=float("inf")):
    """value is an integer, numpy's among them, from least to most. True, which Python counts as 1, is none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= value <= most:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        if most < float("inf"):
            expected = f"an integer from {least} to {most}"
        raise ValueError(f"{owner}: {name} must be {expected}, got {value!r}")


def check_number(owner, name, value, least):
    """value is a finite number, numpy's among them, of at least least."""
    if not isinstance(value, numbers.Real) or not least <= value < float("inf"):
        raise ValueError(f"{owner}: {name} must be a number of at least {least}, got {value!r}")


def check_flags(owner, **flags):
    """Each is True or False, or 1 or 0. No words: "false" would count as true."""
    for name, value in flags.items():
        if value not in (True, False):
            raise ValueError(f"{owner}: {name} must be True or False (in JSON true or false, unquoted), got {value!r}")


def inner_width(owner, expand, d_model):
    """d_inner, the channels inside a block."""
    check_integer(owner, "d_model", d_model)
    check_number(owner, "expand", expand, least=1 / d_model)
    return int(expand * d_model)
