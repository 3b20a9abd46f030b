"""Environment variables that look like a switch and are none: no switch is passed over for its spelling."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

OURS = ("MAMBA", "MM_")
# Of the package manager mamba and its containers; NCCL's, of which one is near to NVCC_THREADS.
OTHERS = (
    *("MAMBA_EXE", "MAMBA_ROOT_PREFIX", "MAMBA_USER", "MAMBA_DOCKERFILE_ACTIVATE", "MAMBA_SKIP_ACTIVATE"),
    *("MAMBARC", "MAMBA_NO_", "NCCL_"),
)
# Short names are near to too many: NDEBUG is not DEBUG.
SHORTEST = 8
# How alike two names are, from 0 to 1: MAX_JOB and MAX_JOBS 0.93, MAMBA_CUDA and MAMBA_SSM_CUDA 0.83.
ALIKE, ALIKE_OF_OURS = 0.85, 0.6


def misspelt(
    environ: Mapping[str, str], switches: Collection[str], without_effect: Collection[str], of_cmake: Mapping[str, str]
) -> list[tuple[str, str]]:
    """(variable, the switch that may be meant, or "") of each that is set, is no switch, and looks like one.

    `of_cmake`: CMake's variables and the switches that set them.
    """
    found = []
    for name, value in sorted(environ.items()):
        upper = name.upper()
        if not value or name in switches or name in without_effect or upper.startswith(OTHERS):
            continue
        if upper.startswith(OURS):
            near = difflib.get_close_matches(upper, sorted(switches), 1, ALIKE_OF_OURS)
            meant = of_cmake.get(upper, near[0] if near else "")
            found.append((name, meant if meant in switches else ""))
        else:
            long = sorted(switch for switch in switches if len(switch) >= SHORTEST)
            found += [(name, meant) for meant in difflib.get_close_matches(upper, long, 1, ALIKE)]
    return found
