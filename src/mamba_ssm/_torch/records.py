"""Operators take flat lists of arguments; the code behind them works with records (NamedTuples) that name each one."""

import typing

import torch

_PARTS = {}  # records -> where each begins and ends in a flat list
# make(Record, values) is Record(*values) in a quarter of the time: it goes past a constructor written in Python.
make = tuple.__new__
_KINDS = {
    torch.Tensor: "Tensor",
    typing.Optional[torch.Tensor]: "Tensor?",  # noqa: UP045  (how get_type_hints spells it)
    bool: "bool",
    int: "int",
    torch.SymInt: "SymInt",  # a size that a compiler may keep open
    float: "float",
}


def signature(*records, written=None):
    """Schema text such as "Tensor u, Tensor? z, bool softplus": the fields of the records in their order. written: the
    name of the tensor that is written in place, or several; with a question mark behind it where it may be None.
    """
    names = [written] if isinstance(written, str) else list(written or ())
    kinds = {name.rstrip("?"): f"Tensor({chr(97 + i)}!){'?' * name.count('?')}" for i, name in enumerate(names)}
    return ", ".join(
        f"{kinds.get(name, _KINDS[kind])} {name}"
        for record in records
        for name, kind in typing.get_type_hints(record).items()
    )


def returns(record):
    """Schema text such as "(Tensor du, Tensor dz)": results that are the record's fields, any of which may be None."""
    return "(" + ", ".join(f"Tensor {name}" for name in record._fields) + ")"


def unpack(arguments, *records):
    """Cuts an operator's flat arguments into these records, one after the other."""
    return [make(record, arguments[part]) for record, part in _PARTS.get(records) or _parts(records)]


def unpack_traced(arguments, *records):
    """unpack for what compilers trace: torch 2.4's follows the records' own constructors alone."""
    result, start = [], 0
    for record in records:
        end = start + len(record._fields)
        result.append(record(*arguments[start:end]))
        start = end
    return result


def _parts(records):
    start, parts = 0, []
    for record in records:
        end = start + len(record._fields)
        parts.append((record, slice(start, end)))
        start = end
    _PARTS[records] = parts
    return parts


def no_gradients(*records):
    """A None for each field of the records: what backward returns for arguments that have no gradient."""
    return (None,) * sum(len(record._fields) for record in records)
