"""One spec an operator: the record of its tensors, each annotated with what it must be (Arg). Checks, the layout that
kernels take, and the struct's fields follow from it, as the schema does (_torch/records.py):

    class Inputs(typing.NamedTuple):
        x: Annotated[torch.Tensor, Arg("activation", "B, L, H, P", "batch len head -")]
        D: Annotated[torch.Tensor | None, Arg("float32", "H | H, P")]

    SPEC = Spec("my_op", Inputs)
"""

import ctypes
import functools
import itertools
import operator
import re
import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import DTYPE_CODES, backwards
from mamba_ssm._torch import make

_CHECKS = {
    "activation": checks.check_same,
    "same": checks.check_same,
    "float": checks.check_float,
    "float32": checks.check_float32,
    "int32": checks.check_int32,
    "index": checks.check_index,
}


_EXACT = {"float32": torch.float32, "int32": torch.int32}


class Arg(typing.NamedTuple):
    """What a tensor must be."""

    # "activation": float32, float16 or bfloat16, of one dtype with the first; "same": of the first tensor's dtype;
    # "float": any of the three; "float32"; "int32"; "index": int32 or int64; "": by a check of the operator's own.
    dtype: str
    # Sizes: letters, or such as "R + 2 N". A letter that no tensor before had is this tensor's to say. Shapes separated
    # by "|" differ in their number of dimensions; the first is asked for where none has the tensor's.
    shape: str
    # For each shape, separated by "|": the struct's stride fields of its dimensions, without the tensor's name and
    # "_stride"; "-": that stride must be 1; ".": it has no field. None: the tensor must be contiguous.
    strides: str = ""
    field: str = ""  # of the struct, where it is not the tensor's name
    stem: str = ""  # of the stride fields, where it is neither
    code: str = ""  # the struct's field of the dtype
    as_it_is: bool = False  # in any layout


class _Shape(typing.NamedTuple):
    letters: str  # as errors write it
    sizes: list[str]
    strides: list[str]


class _Tensor(typing.NamedTuple):
    """A field of a record."""

    name: str
    arg: Arg
    optional: bool
    exact: torch.dtype | None  # the only dtype
    binds: bool  # whether it says sizes
    first: _Shape
    shapes: dict[int, _Shape]  # by number of dimensions

    def shape_of(self, tensor):
        return self.shapes.get(tensor.dim(), self.first)


class Spec:
    """Checks and layout of the tensors of a record. op: as errors call the operator."""

    def __init__(self, op, record):
        self.op, self.record, self.tensors = op, record, tensors_of(record)
        self.subsets = {}

    def bind(self, inputs):
        """{letter: size}; raises where a tensor that says sizes has another number of dimensions."""
        sizes = {}
        for field, tensor in zip(self.tensors, inputs, strict=True):
            if not field.binds or (tensor is None and field.optional):
                continue
            if tensor is None or tensor.dim() not in field.shapes:
                checks.check_dims(self.op, field.name, tensor, len(field.first.sizes), field.first.letters)
            if field.arg.dtype == "activation":
                checks.check_activation_dtype(self.op, field.name, tensor)
            for letter, size in zip(field.shape_of(tensor).sizes, tensor.shape, strict=True):
                sizes.setdefault(letter, size)
        return sizes

    def check(self, inputs, sizes, names=None, op=None, like=None, like_name=None):
        """Raises unless each tensor, or those of these names, has its shape and dtype, and the device of like: the
        first tensor, unless it is given. inputs: of any record with these names.
        """
        if like is None:
            like, like_name = inputs[0], self.tensors[0].name
        op, dtype, device = op or self.op, like.dtype, like.device
        fields, tensors_in = self.subsets.get(names) or self._subset(names)
        for field, tensor in zip(fields, tensors_in(inputs), strict=True):
            if tensor is None and field.optional:
                continue
            shape = field.shapes.get(tensor.dim()) or field.first
            expected = tuple([sizes[text] if text in sizes else _size(text, sizes) for text in shape.sizes])
            if tensor.dtype != (field.exact or dtype) or tensor.shape != expected or tensor.device != device:
                _CHECKS[field.arg.dtype](op, field.name, tensor, expected, like, like_name, shape.letters)

    def _subset(self, names):
        """The fields of these names that have a dtype, and a function that takes their tensors out of a record."""
        fields = [field for field in self.tensors if field.arg.dtype and (names is None or field.name in names)]
        taken = [field.name for field in fields]
        getter = operator.attrgetter(*taken) if len(taken) > 1 else lambda inputs: [getattr(inputs, taken[0])]
        self.subsets[names] = fields, getter
        return self.subsets[names]

    def layout(self, inputs):
        """The same tensors in the layout that the kernels take."""
        if checks.all_contiguous(inputs):
            return inputs
        return make(self.record, [_laid_out(*pair) for pair in zip(self.tensors, inputs, strict=True)])


@functools.cache
def tensors_of(record):
    """The annotated fields of a record."""
    known, tensors = set(), []
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        kind, arg = typing.get_args(hint)
        texts = arg.shape.split(" | ")
        strides = [text.split() for text in arg.strides.split(" | ")]
        shapes = []
        for text, names in itertools.zip_longest(texts, strides, fillvalue=[]):
            sizes = text.split(", ")
            shapes.append(_Shape(f"({text}{',' if len(sizes) == 1 else ''})", sizes, names))
        letters = {size for shape in shapes for size in shape.sizes if re.fullmatch("[A-Z]", size)}
        binds, optional = bool(arg.dtype and letters - known), type(None) in typing.get_args(kind)
        known |= letters
        by_dims = {len(shape.sizes): shape for shape in shapes}
        tensors.append(_Tensor(name, arg, optional, _EXACT.get(arg.dtype), binds, shapes[0], by_dims))
    return tensors


def _size(text, sizes):
    """The value of such as "R + 2 N" or "W-1"."""
    total = 0
    for term in text.replace("-", "+ -").split("+"):
        factors = [int(factor) if re.fullmatch(r"-?\d+", factor) else sizes[factor] for factor in term.split()]
        total = total + functools.reduce(lambda product, factor: product * factor, factors)
    return total


def _laid_out(field, tensor):
    if tensor is None or field.arg.as_it_is:
        return tensor
    strides = field.shape_of(tensor).strides
    if not strides:
        return tensor.contiguous()
    return checks.unit_last_stride(tensor) if strides[-1] == "-" else tensor


# ---- structs ---------------------------------------------------------------------------------------------------------


def fill(params, *records):
    """Sets a struct's fields from records: of tensors (or Views) in kernel layout; of sizes and options, from whatever
    has the name of a field.
    """
    kinds = (type(params), *map(type, records))
    (_FILLS.get(kinds) or _compile(kinds))(params, *records)


_FILLS: dict[tuple[type, ...], typing.Any] = {}  # (struct, *records) -> what `fill` does


def _compile(kinds):
    """The function as one would write it by hand: this is on the way of each launch, and loops take twice as long."""
    struct, *records = kinds
    lines = [f"def fill(params, {', '.join(f'r{number}' for number in range(len(records)))}):"]
    for number, record in enumerate(records):
        hints = typing.get_type_hints(record, include_extras=True)
        if not any(hasattr(hint, "__metadata__") for hint in hints.values()):
            lines += [f" params.{name} = r{number}.{name}" for name in _scalars(struct) if hasattr(record, name)]
            continue
        for index, field in enumerate(tensors_of(record)):
            lines += [f" tensor = r{number}[{index}]", " if tensor is not None:"]
            lines += [f"  {line}" for line in _of_tensor(field)]
    wanted = set(re.findall(r"params\.(\w+)", "\n".join(lines)))
    missing = sorted(name for name in wanted if not hasattr(struct, name))
    if missing:
        raise AttributeError(f"{struct.__name__} has no {', '.join(missing)}, which a record names")
    found = {"codes": DTYPE_CODES}
    exec("\n".join(lines), found)
    _FILLS[kinds] = found["fill"]
    return found["fill"]


def _of_tensor(field):
    """Lines that set a tensor's fields."""
    arg = field.arg
    pointer = arg.field or field.name
    yield f"params.{pointer} = tensor.data_ptr()"
    if arg.code:
        yield f"params.{arg.code} = codes[tensor.dtype]"
    for dims, shape in field.shapes.items():
        if shape.strides:
            names = ["_" if name in "-." else f"params.{arg.stem or pointer}_{name}_stride" for name in shape.strides]
            guard = f"if tensor.dim() == {dims}: " if len(field.shapes) > 1 else ""
            yield f"{guard}{', '.join(names)}{',' if len(names) == 1 else ''} = tensor.stride()"


def _scalars(struct):
    for name, kind in struct._fields_:
        if issubclass(kind, ctypes.Structure):
            yield from _scalars(kind)
        elif kind is not ctypes.c_void_p and name not in ("device", "num_threads"):
            yield name


def backwards_in_time(record, lengths):
    """A record for `fill` as kernels take it that begin at the last step. lengths: {size: its value} of the dimensions
    that go along the steps; tensors with a stride of one become Views.
    """
    turned = []
    for field, tensor in zip(tensors_of(type(record)), record, strict=True):
        shape = None if tensor is None else field.shape_of(tensor)
        steps = [dim for dim, size in enumerate(shape.sizes) if size in lengths] if shape and shape.strides else []
        turned.append(backwards(tensor, steps[0], lengths[shape.sizes[steps[0]]]) if steps else tensor)
    return make(type(record), turned)
