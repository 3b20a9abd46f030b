"""Reading GGUF files (versions 2 and 3, little endian).

The package gguf has a reader too, but it believes the lengths that a file states, so a damaged one can keep it busy
without end. Here every length is compared with what is left of the file.
"""

import os
import struct
import typing
from pathlib import Path

import torch

from mamba_ssm._arguments import first_few, shown
from mamba_ssm.utils.hf import CheckpointError, CheckpointNotFoundError

Q8_0 = "Q8_0"
_BLOCK, _BLOCK_BYTES = 32, 34  # of Q8_0: a float16 scale, then 32 int8
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Those that are read, and names for the errors of others.
_TYPES = {0: "F32", 1: "F16", 8: Q8_0, 30: "BF16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K"}
_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 28: "F64"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4


class Tensor(typing.NamedTuple):
    """What the file says of a tensor. shape: as torch's, the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the beginning of the file
    size: int  # bytes


class GGUFFile:
    """The metadata and the list of tensors of a GGUF file, which are read at once; the tensors' data when asked for.

    Raises:
        CheckpointNotFoundError: there is no such file. CheckpointError: it is damaged, cut off or of another kind.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = Path(file)
        if not self.path.is_file():
            raise CheckpointNotFoundError(f"there is no file {shown(str(file))}")
        self.metadata: dict[str, typing.Any] = {}
        self.tensors: dict[str, Tensor] = {}
        with open(self.path, "rb") as opened:
            self._file: typing.BinaryIO = opened
            self._size = os.fstat(opened.fileno()).st_size
            self._read_header()

    def error(self, problem: str) -> CheckpointError:
        """To raise: the file's name and what is wrong with it."""
        return CheckpointError(f"{self.path}: {problem}")

    def _read_header(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise self.error("is no GGUF file: it does not begin with the letters GGUF")
        (version,) = self._unpack("I")
        if version not in (2, 3):
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            what = "is big endian" if big else f"has version {version}"
            raise self.error(f"{what}; versions 2 and 3, little endian, are read")
        tensors, fields = self._unpack("QQ")
        self._check_count("metadata fields", fields, 8 + 4 + 1)
        for _ in range(fields):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I")[0])
        self._check_count("tensors", tensors, 8 + 4 + 4 + 8)
        listed = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.error(f"is damaged: general.alignment must be a power of two from 8, got {shown(alignment)}")
        start = -(-self._file.tell() // alignment) * alignment
        for tensor in listed:
            if tensor.name in self.tensors:
                raise self.error(f"is damaged: it has two tensors {first_few([tensor.name])}")
            found = tensor._replace(offset=start + tensor.offset)
            if found.offset + found.size > self._size:
                raise self.error(
                    f"is cut off: {first_few([tensor.name])} ends at byte {found.offset + found.size}, and the file "
                    f"has {self._size}; get it again"
                )
            self.tensors[tensor.name] = found
        size = sum(tensor.size for tensor in listed)
        if size > self._size - start:
            raise self.error(f"is damaged: its {self._size - start} bytes of tensors are {size}, so some overlap")

    def _unpack(self, letters: str) -> tuple[typing.Any, ...]:
        layout = struct.Struct(f"<{letters}")
        return layout.unpack(self._bytes(layout.size))

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise self.error(f"is damaged or cut off: byte {self._file.tell()} promises {count} more than it has")
        return self._file.read(count)

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > self._size - self._file.tell():
            raise self.error(
                f"is damaged or cut off: it promises {count} {what}, which do not fit its {self._size} bytes"
            )

    def _string(self) -> str:
        text = self._bytes(self._unpack("Q")[0])
        return text.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> typing.Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise self.error(f"is damaged: {kind} is no type of metadata")
        kind, count = self._unpack("IQ")
        if kind == _STRING:
            self._check_count("strings", count, 8)
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.error(f"is damaged: {kind} is no type of an array's elements")
        letter: typing.Any = _SCALARS[kind]
        self._check_count("numbers", count, struct.calcsize(f"<{letter}"))
        data = self._bytes(count * struct.calcsize(f"<{letter}"))
        return memoryview(data).cast(letter)  # no list: it may be long

    def _tensor_info(self) -> Tensor:
        name = self._string()
        (dims,) = self._unpack("I")
        if dims > _MOST_DIMS:
            raise self.error(
                f"is damaged: {first_few([name])} has {dims} dimensions, and at most {_MOST_DIMS} are possible"
            )
        shape = tuple(reversed(self._unpack(f"{dims}Q")))
        code, offset = self._unpack("IQ")
        kind = _TYPES.get(code, f"type {code}")
        elements = 1
        for size in shape:
            elements *= size
        if kind == Q8_0:
            if not shape or shape[-1] % _BLOCK:
                raise self.error(
                    f"is damaged: {first_few([name])} is Q8_0 with rows that are no multiple of {_BLOCK}: {shape}"
                )
            size = elements // _BLOCK * _BLOCK_BYTES
        elif kind in DTYPES:
            size = elements * DTYPES[kind].itemsize
        else:
            known = ", ".join([*DTYPES, Q8_0])
            raise self.error(
                f"{first_few([name])} has the type {kind}, and {known} are read: convert the file to one of these"
            )
        return Tensor(name, shape, kind, offset, size)

    def read(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A tensor's data and None, or of Q8_0 int8 and the scales, float16 (..., blocks)."""
        tensor = self.tensors[name]
        data = bytearray(tensor.size)
        with open(self.path, "rb") as file:
            file.seek(tensor.offset)
            if file.readinto(data) != tensor.size:
                raise self.error(f"is cut off: {first_few([name])} has no end")
        if tensor.size == 0:
            return torch.empty(tensor.shape, dtype=DTYPES.get(tensor.type, torch.int8)), None
        if tensor.type != Q8_0:
            return torch.frombuffer(data, dtype=DTYPES[tensor.type]).view(tensor.shape), None
        blocks = torch.frombuffer(data, dtype=torch.uint8).view(*tensor.shape[:-1], -1, _BLOCK_BYTES)
        values = blocks[..., 2:].contiguous().view(torch.int8).view(tensor.shape)
        return values, blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)


def q8_0_bytes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 (out, in) and float16 scales (out, in / 32) as the blocks of Q8_0: uint8 (out, in / 32 * 34)."""
    blocks = weight.view(*scales.shape, _BLOCK).view(torch.uint8)
    return torch.cat([scales.contiguous()[..., None].view(torch.uint8), blocks], dim=-1).flatten(1)
