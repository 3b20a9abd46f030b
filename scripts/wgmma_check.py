"""Registers that products of warpgroups (wgmma) still use when other instructions touch them.

    python scripts/wgmma_check.py mamba_ssm/lib/libmamba_cuda.so

Such products run on while the warp does. Until it waits, what they read from registers must not be written, and what
they write neither read nor written. ptxas knows that, and does not keep to it in every case. The emulator cannot see
it, and on a GPU results are wrong only where products are late. So this reads the machine code, as cuobjdump prints it,
of the CUDA toolkit or of the triton that comes with torch. Needs the extra `publish`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import NamedTuple

from wheel_check import fatbin
from wheel_check.libraries import read_elf

LINE = re.compile(
    r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<name>[^\s;]+)\s*(?P<operands>[^;]*);"
)
COMPUTED = ("BRX", "JMX")  # branches
MOST_GROUPS = 8  # that are told apart
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+(\.F32)?")
# Their first operand, if it is a register, is read.
NO_RESULT = re.compile(
    r"(ST|RED|BAR|BRA|BRX|BSSY|BSYNC|CALL|RET|EXIT|SYNCS|UBLK|UTMA|CCTL|MEMBAR|FENCE|R2UR|[DFHI]SETP|PLOP3|R2P|WARP|LDGSTS)"
)


class Instruction(NamedTuple):
    address: int
    guarded: bool  # a predicate may leave it out
    name: str
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.address:#x} {self.name} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Products:
    """Registers, by number."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()

    def __or__(self, other: Products) -> Products:
        return Products(self.reads | other.reads, self.writes | other.writes)


@dataclass(frozen=True)
class UnderWay:
    """Before an instruction, on whichever way it is reached."""

    begun: Products = Products()  # of no group yet
    groups: tuple[Products, ...] = ()  # the newest last

    def __or__(self, other: UnderWay) -> UnderWay:
        count = max(len(self.groups), len(other.groups))
        mine, theirs = ((Products(),) * (count - len(each.groups)) + each.groups for each in (self, other))
        return UnderWay(self.begun | other.begun, tuple(map(or_, mine, theirs)))

    @property
    def all(self) -> Products:
        return reduce(or_, self.groups, self.begun)


def kernels(listing: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """Of cuobjdump's listing."""
    name, found = "", []
    for line in listing:
        if "Function : " in line:
            if found:
                yield name, found
            name, found = line.split(" : ")[1].strip(), []
        elif match := LINE.match(line):
            operands = [operand.strip() for operand in match["operands"].split(",") if operand.strip()]
            found.append(Instruction(int(match["address"], 16), bool(match["guard"]), match["name"], operands))
    if found:
        yield name, found


def faults(kernel: list[Instruction]) -> list[str]:
    """What each instruction touches too early, by address."""
    at = {instruction.address: index for index, instruction in enumerate(kernel)}
    before: list[UnderWay | None] = [None] * len(kernel)
    found = {}
    for start in range(len(kernel)):
        # What is new here, behind the first one, is reached by computed branches, which no product may run across.
        ways = [(start, UnderWay())] if before[start] is None else []
        while ways:
            index, state = ways.pop()
            known = before[index]
            if known is not None and known | state == known:
                continue
            state = before[index] = state if known is None else known | state
            instruction = kernel[index]
            if said := _touches(instruction, state):
                found[instruction.address] = f"{instruction}: {said}"
            state = _after(instruction, state)
            target = re.search(r"0x([0-9a-f]+)$", instruction.operands[-1]) if instruction.operands else None
            if instruction.name.startswith(("BRA", "CALL", "WARPSYNC.COLLECTIVE")) and target:
                ways.append((at[int(target[1], 16)], state))
            if index + 1 < len(kernel) and not _always_leaves(instruction):
                ways.append((index + 1, state))
    return [found[address] for address in sorted(found)]


def _always_leaves(instruction: Instruction) -> bool:
    """Whether what stands behind it never follows it."""
    if instruction.guarded or any(re.match(r"!?U?P\d", operand) for operand in instruction.operands):
        return False
    return instruction.name in ("BRA", "BRA.U", "EXIT") or instruction.name.startswith(("RET", *COMPUTED))


def _after(instruction: Instruction, state: UnderWay) -> UnderWay:
    if match := PRODUCT.match(instruction.name):
        sums = _registers(instruction.operands[0], int(match[1]) // (2 if match[2] else 4))
        begun = state.begun | Products(_registers(instruction.operands[1], 4), sums)
        if "gsb0" not in instruction.operands:
            return UnderWay(begun, state.groups)
        groups = (*state.groups, begun)
        if len(groups) > MOST_GROUPS:
            groups = (groups[0] | groups[1], *groups[2:])
        return UnderWay(groups=groups)
    if instruction.name.startswith("WARPGROUP.DEPBAR"):
        left = int(instruction.operands[-1], 16)  # of the groups, how many may still run
        return UnderWay(state.begun, state.groups[max(len(state.groups) - left, 0) :])
    return state


def _touches(instruction: Instruction, state: UnderWay) -> str:
    if PRODUCT.match(instruction.name) or state == UnderWay():
        return ""  # products wait for each other
    if instruction.name.startswith(COMPUTED):
        return "leads to where is not known, while products run"
    products = state.all
    operands = [operand for operand in instruction.operands if not re.match(r"!?U?PT?\d?$", operand)]
    writes: frozenset[int] = frozenset()
    if operands and not NO_RESULT.match(instruction.name) and "[" not in operands[0]:
        writes = _registers(operands.pop(0))
    reads = frozenset().union(*map(_registers, operands))
    for verb, registers in (
        ("writes what products read", writes & products.reads),
        ("writes what products write", writes & products.writes),
        ("reads what products write", reads & products.writes),
    ):
        if registers:
            return f"{verb}, R{min(registers)}"
    return ""


def _registers(operand: str, count: int = 1) -> frozenset[int]:
    """The count registers from each that it names. Of other instructions' vectors the first one tells: they begin at
    multiples of their size, as what products have does at multiples of four.
    """
    found = map(int, re.findall(r"(?<!U)R(\d+)", operand))
    return frozenset(number for first in found for number in range(first, first + count))


def has_products(code: bytes) -> bool:
    """By the lowest bits of an instruction's 16 bytes: the operation's number, and that no predicate guards it."""
    return any(code[at : at + 2] in (b"\xf0\x79", b"\xf0\x7d") for at in range(0, len(code), 16))


def find_cuobjdump() -> str | None:
    triton = importlib.util.find_spec("triton")
    beside_torch = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    return shutil.which("cuobjdump") or (str(beside_torch) if beside_torch and beside_torch.is_file() else None)


def check(library: Path, cuobjdump: str) -> tuple[int, list[str]]:
    """How many kernels have such products, and the faults of all."""
    count, found = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for container in fatbin.containers(read_elf(library.read_bytes()).device_code):
            for entry in container:
                if not entry.target.startswith("90a-real") or not has_products(entry.code()):
                    continue
                path = Path(folder, "kernels.cubin")
                path.write_bytes(entry.code())
                done = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True)
                for name, kernel in kernels(done.stdout.splitlines()):
                    if any(PRODUCT.match(instruction.name) for instruction in kernel):
                        count += 1
                        found += [f"{name}: {fault}" for fault in faults(kernel)]
    return count, found


def main() -> int:
    cuobjdump = find_cuobjdump()
    if len(sys.argv) != 2 or cuobjdump is None:
        raise SystemExit(__doc__ if len(sys.argv) != 2 else "there is no cuobjdump on PATH, nor beside torch")
    count, found = check(Path(sys.argv[1]), cuobjdump)
    print(*found, f"{count} kernels with products of warpgroups, {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
