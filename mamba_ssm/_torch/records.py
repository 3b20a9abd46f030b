"""Operators take flat lists of arguments; the code behind them works with records (NamedTuples) that name each one.

The list has the fields of the records in their order, and then those of all records that have a default (False): so an
operator can gain an argument, and programs that were exported before still call it.
"""

import operator
import typing

import torch

_PARTS = {}  # records -> how each is taken from a flat list
_ORDERS = {}  # records -> how a flat list is taken from all their fields
# make(Record, values) is Record(*values) in a quarter of the time: it skips a constructor written in Python.
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
    texts = [[], []]
    for record in records:
        for name, kind in typing.get_type_hints(record).items():
            text = f"{kinds.get(name, _KINDS[kind])} {name}"
            late = name in record._field_defaults
            texts[late].append(f"{text}={record._field_defaults[name]}" if late else text)
    return ", ".join(texts[0] + texts[1])


def returns(record):
    """Schema text such as "(Tensor du, Tensor dz)": results that are the record's fields, any of which may be None."""
    return "(" + ", ".join(f"Tensor {name}" for name in record._fields) + ")"


def unpack(arguments, *records):
    """Cuts an operator's flat arguments into these records, which are all that it has."""
    return [make(record, take(arguments)) for record, take in _PARTS.get(records) or _parts(records)]


def unpack_traced(arguments, *records):
    """unpack for what compilers trace: torch 2.4's follows the records' own constructors alone. For records of tensors,
    without defaults.
    """
    result, start = [], 0
    for record in records:
        end = start + len(record._fields)
        result.append(record(*arguments[start:end]))
        start = end
    return result


def flat(*values):
    """An operator's flat arguments from its records' values."""
    records = tuple([type(value) for value in values])
    return (_ORDERS.get(records) or _order(records))([field for value in values for field in value])


def _places(records):
    """The places of each record's fields in a flat list."""
    early = sum(len(record._fields) - len(record._field_defaults) for record in records)
    place, late = 0, early
    places = []
    for record in records:
        first, last = len(record._fields) - len(record._field_defaults), len(record._field_defaults)
        places.append([*range(place, place + first), *range(late, late + last)])
        place, late = place + first, late + last
    return places


def _parts(records):
    parts = []
    for record, places in zip(records, _places(records), strict=True):
        whole = places == list(range(places[0], places[0] + len(places)))
        which = [slice(places[0], places[0] + len(places))] if whole else places
        parts.append((record, operator.itemgetter(*which)))
    _PARTS[records] = parts
    return parts


def _order(records):
    places = [place for part in _places(records) for place in part]
    _ORDERS[records] = order = operator.itemgetter(*sorted(range(len(places)), key=places.__getitem__))
    return order


def no_gradients(*records):
    """A None for each field of the records: what backward returns for arguments that have no gradient."""
    return (None,) * sum(len(record._fields) for record in records)
