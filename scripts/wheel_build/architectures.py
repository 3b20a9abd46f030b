"""TORCH_CUDA_ARCH_LIST: every spelling of torch's and CMake's, to one list as CMake spells it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .config import SwitchError

SWITCH = "TORCH_CUDA_ARCH_LIST"
# GPUs of 8.6 and 8.9 run the machine code for 8.0: a compiler makes nearly the same for them.
DEFAULT = "7.5;8.0;9.0;10.0;12.0+PTX"
# torch's names, with torch's meaning.
NAMED = {
    "maxwell": "5.0;5.2+PTX",
    "pascal": "6.0;6.1+PTX",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}
# GPUs that run machine code for 9.0 run that for 9.0a, which alone has wgmma, their tensor cores' fastest instruction.
HOPPER = 90
SPELLINGS = (
    "8.6, 86, 8.6+PTX, 86-real, 86-virtual, 90a, 12.0, 120, native, all, all-major, "
    "Turing, Ampere, Ada, Hopper, Blackwell, separated by ';', ',' or spaces"
)
ONE = re.compile(r"(?:(\d{1,2})\.(\d)|(\d{2,3}))([af]?)(\+ptx|-real|-virtual)?")


@dataclass(frozen=True, order=True)
class Target:
    """One piece of device code: machine code for one architecture (real) or PTX (virtual)."""

    number: int  # 86 for compute capability 8.6
    suffix: str = ""  # "a": only this architecture, "f": its family
    virtual: bool = False

    def __str__(self) -> str:
        return f"{self.number}{self.suffix}-{'virtual' if self.virtual else 'real'}"


@dataclass(frozen=True)
class Architectures:
    targets: tuple[Target, ...]
    left_out: tuple[str, ...] = ()  # of the default list, in torch's spelling

    @property
    def cmake(self) -> list[str]:
        return [str(target) for target in self.targets]

    @property
    def count(self) -> int:
        """How many compilations of one source nvcc can run side by side."""
        return len({(target.number, target.suffix) for target in self.targets})


def machine_code(number: int, suffix: str = "") -> Target:
    return Target(number, suffix or ("a" if number == HOPPER else ""))


def dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def plan_architectures(
    text: str, supported: Sequence[int], nvcc_version: tuple[int, int], native: Iterable[int] = ()
) -> Architectures:
    """The targets to compile for.

    `supported`: what this nvcc can compile, such as [75, 80, 120]. `native`: compute capabilities of the GPUs present.
    Raises SwitchError for a word that is no architecture, one that this nvcc does not know, or `native` without a GPU.
    """
    if not text.strip():
        return _default(supported)
    words = [word for word in re.split(r"[;,\s]+", text.strip()) if word]
    targets: set[Target] = set()
    for word in words:
        targets |= _expand(word, text, sorted(supported), sorted(set(native)))
    if not targets:
        raise SwitchError(SWITCH, text, SPELLINGS)
    for target in sorted(targets):
        _check(target, text, supported, nvcc_version)
    return Architectures(tuple(sorted(targets)))


def check_spelling(text: str) -> None:
    """Raises SwitchError for a word that is no architecture, where there is no nvcc to ask more of."""
    for word in re.split(r"[;,\s]+", text.strip()) if text.strip() else []:
        if word:
            _expand(word, text, [75], [75])
    if text.strip() and not re.sub(r"[;,\s]+", "", text):
        raise SwitchError(SWITCH, text, SPELLINGS)


def _expand(word: str, text: str, supported: list[int], native: list[int]) -> set[Target]:
    lower = word.lower()
    if lower in ("all", "all-major"):
        chosen = [number for number in supported if lower == "all" or number % 10 == 0]
        # nvcc's own rule for all-major: the earliest architecture stands for those below its major ones.
        chosen = sorted({supported[0], *chosen})
        return {machine_code(number) for number in chosen} | {Target(chosen[-1], virtual=True)}
    if lower == "native":
        if not native:
            allowed = "native only where the build sees an NVIDIA GPU; elsewhere the architecture by name, such as 8.6"
            raise SwitchError(SWITCH, text, allowed, "native-without-gpu")
        return {machine_code(number) for number in native}
    if lower.removesuffix("+ptx") in NAMED:
        return {target for part in NAMED[lower.removesuffix("+ptx")].split(";") for target in _one(part, text)}
    return _one(word, text)


def _one(word: str, text: str) -> set[Target]:
    match = ONE.fullmatch(word.lower())
    if match is None:
        raise SwitchError(SWITCH, text, f"{SPELLINGS} ({word!r} is none of these)")
    major, minor, plain, suffix, kind = match.groups()
    number = int(major) * 10 + int(minor) if major else int(plain)
    real, virtual = machine_code(number, suffix), Target(number, suffix, virtual=True)
    # A plain number is machine code only, as torch means it: "86" and "8.6" are the same plan.
    return {"+ptx": {real, virtual}, "-virtual": {virtual}}.get(kind or "", {real})


def _check(target: Target, text: str, supported: Sequence[int], nvcc_version: tuple[int, int]) -> None:
    known = target.number in supported
    if target.suffix == "a":
        known = known and target.number >= 90
    elif target.suffix == "f":
        known = known and target.number >= 100 and nvcc_version >= (12, 9)
    if not known:
        can = ", ".join(dotted(number) for number in sorted(supported))
        raise SwitchError(
            SWITCH,
            text,
            f"what nvcc {nvcc_version[0]}.{nvcc_version[1]} can compile: {can}"
            f" ({dotted(target.number)}{target.suffix} is not among them)",
            "architecture-unknown",
        )


def _default(supported: Sequence[int]) -> Architectures:
    wanted = sorted({target for word in DEFAULT.split(";") for target in _one(word, DEFAULT)})
    kept = {target for target in wanted if target.number in supported}
    left_out = sorted({target.number for target in wanted if target.number not in supported})
    if kept:
        # PTX of the newest architecture kept, so that GPUs newer than this nvcc still run.
        kept.add(Target(max(kept).number, virtual=True))
    return Architectures(tuple(sorted(kept)), tuple(dotted(number) for number in left_out))
