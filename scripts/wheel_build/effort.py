"""How long sources take to compile: for the plan's estimate, and for the time left while they are compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Seconds of one core (nvcc 13.0, gcc 12) by folder of csrc. CPU: of one instruction set, the mean of three. CUDA: of
# bfloat16 and one architecture, in a build of all dtypes that took 3.9 minutes on two cores. What counts is how folders
# compare: the time left follows the speed seen.
CPU = {
    "selective_scan": 10,
    "causal_conv1d": 5,
    "state_update": 1.3,
    "ssd": 5,
    "mamba3": 8,
    "mamba3_inputs": 1.6,
    "norm": 6,
    "cross_entropy": 0.9,
    "linear": 0.7,
    "mamba2_step": 0.9,
    "mamba_step": 0.6,
}
CUDA = {
    "selective_scan/forward": 17,
    "selective_scan/backward": 28,
    "causal_conv1d": 6,
    "state_update": 2.4,
    "ssd": 15,
    "mamba3": 34,
    "mamba3_inputs": 1.8,
    "norm": 5.3,
    "cross_entropy": 1.0,
    "linear": 1.7,
    "mamba2_step": 2.9,
    "mamba_step": 2.9,
}
# Of each architecture after the first, as a share of it: on two cores seven took 65 minutes where one took 6.5 (with
# other kernels than now), since nvcc then runs as many compilers side by side as there are architectures.
FURTHER = 1.7
DISPATCH = 0.5  # cpu.cpp, cuda.cu and what else there is: seconds each
ISAS = 3
STEP = re.compile(r"Building (CXX|CUDA) object \S*?\.dir[\\/](\w+)[\\/](?:cpu|cuda)[\\/](\w+)")


def of_step(step: str, architectures: int) -> float:
    """Seconds of one core for a step as ninja names it: "Building CUDA object x.dir/ssd/cuda/kernels.cu.o"."""
    found = STEP.match(step)
    if found is None:
        return DISPATCH
    language, folder, name = found.groups()
    if language == "CXX":
        return CPU.get(folder, DISPATCH)
    return CUDA.get(source(folder, name), DISPATCH) * max(1.0, _times(architectures))


def source(folder: str, name: str) -> str:
    """The key of csrc/FOLDER/cuda/NAME.cu in CUDA."""
    return folder if name == "kernels" else f"{folder}/{name}"


def _times(architectures: int) -> float:
    return 1 + FURTHER * (architectures - 1) if architectures else 0.0


def seconds(dtypes: Sequence[str], architectures: int, cores: int) -> float:
    """Of a whole build. architectures: 0 without CUDA. cores: those that compile."""
    work = ISAS * sum(CPU.values())
    work += _times(architectures) * len(dtypes) * sum(CUDA.values())
    # However many cores there are, one source is compiled by one process, which takes its architectures side by side.
    longest = max(CUDA.values()) if architectures else max(CPU.values())
    return max(work / cores, longest)


def words(amount: float) -> str:
    """Seconds as one says them: "about 45 minutes"."""
    minutes = amount / 60
    if minutes < 0.8:
        return "less than a minute"
    if minutes < 1.5:
        return "about a minute"
    return f"about {round(minutes) if minutes < 10 else 5 * round(minutes / 5)} minutes"
