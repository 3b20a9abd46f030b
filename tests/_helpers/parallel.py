"""How many processes a run of pytest takes where the command does not say: one for each core, for folders of tests."""

from __future__ import annotations

import re
from pathlib import Path

from wheel_build.facts import GIB, cores, free_memory

MEMORY = 2 * GIB  # torch, transformers and torch's compiler in one process
MOST = 16  # each collects all tests


def set_up(config) -> str:
    """Sets pytest-xdist's options; returns a line for the report's header, "" where there is nothing to say."""
    option = config.option
    if hasattr(config, "workerinput") or getattr(option, "numprocesses", None) is not None or alone(config):
        return ""
    count = how_many(cores(), free_memory())
    if count == 1:
        return ""
    if not config.pluginmanager.hasplugin("xdist"):
        return "pytest-xdist is not installed: one process runs all tests (pip install pytest-xdist)"
    option.numprocesses, option.dist = count, "worksteal"
    return f"{count} processes, one for each core (-n 0: one in all)"


def alone(config) -> bool:
    """Whether other processes are of no use: a debugger, single files or tests, tests that share a GPU's memory."""
    option = config.option
    interactive = option.usepdb or option.trace or option.collectonly or option.capture == "no"
    folder = config.invocation_params.dir
    files = not all((Path(folder) / word.split("::")[0]).is_dir() for word in config.args)
    on_gpu = has_gpu() and not re.search(r"\bnot\s+gpu\b", option.markexpr)
    return interactive or files or on_gpu or getattr(option, "dist", "no") != "no"


def how_many(cores: int, memory: int | None) -> int:
    return max(1, min(cores, MOST, memory // MEMORY if memory is not None else MOST))


def threads(processes: int) -> int:
    """Of each process' own."""
    return max(1, cores() // processes)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
