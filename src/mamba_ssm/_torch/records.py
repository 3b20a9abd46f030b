"""Operators take flat lists of arguments; the code behind them works with records (NamedTuples) that name each one."""

import typing

import torch

from mamba_ssm._torch.private import is_compiling

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
    name of the tensor that is written in place.
    """
    return ", ".join(
        f"{'Tensor(a!)' if name == written else _KINDS[kind]} {name}"
        for record in records
        for name, kind in typing.get_type_hints(record).items()
    )


def returns(record):
    """Schema text such as "(Tensor du, Tensor dz)": results that are the record's fields, any of which may be None."""
    return "(" + ", ".join(f"Tensor {name}" for name in record._fields) + ")"


def unpack(arguments, *records):
    """Cuts an operator's flat arguments into these records, one after the other."""
    traced = is_compiling()  # torch 2.4's tracer does not follow _make, which takes half as long
    result, start = [], 0
    for record in records:
        end = start + len(record._fields)
        part = arguments[start:end]
        result.append(record(*part) if traced else record._make(part))
        start = end
    return result


def no_gradients(*records):
    """A None for each field of the records: what backward returns for arguments that have no gradient."""
    return (None,) * sum(len(record._fields) for record in records)
