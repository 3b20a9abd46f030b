"""A win_amd64 wheel from the gate's DLLs, assembled by the wheel builder's own commands and marked as cross-built."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import setuptools
from wheel_build import build_info, cmake, commands, tools
from wheel_build.plan import Plan
from wheel_check import verify

from .gate import CPU, CUDA, ROOT, dll
from .toolchain import MINGW, GateError


def cross_built_info(plan: Plan, cache: Path, libraries: list[Path]) -> dict:
    """build_info.json of the wheel: as of any other, and how its libraries came about."""
    macros = tools.run(f"{MINGW}-gcc-posix", "-include", "_mingw.h", "-dM", "-E", "-x", "c", os.devnull)
    major, minor = (re.search(rf"__MINGW64_VERSION_{part} (\d+)", macros) for part in ("MAJOR", "MINOR"))
    info = build_info.describe(plan, ROOT, cache / CUDA, libraries)
    return {
        **info,
        "flags": {**cmake.flags(cache / CPU), **info["flags"]},
        "cross_built": {
            "on": "Linux",
            CUDA: f"nvcc.exe {plan.facts.nvcc_full_version} under Wine, host code by clang-cl for Visual C++",
            CPU: cmake.toolchains(cache / CPU).get("CXX", ""),
            "mingw_w64": f"{major[1]}.{minor[1]}" if major and minor else "",
            "run_on_windows": False,
        },
    }


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def assemble(plan: Plan, cache: Path) -> Path:
    """The wheel, in cache/dist."""

    class CopyNative(commands.BuildNative):
        def run(self) -> None:
            target = Path(self.build_lib) / commands.LIB
            target.mkdir(parents=True, exist_ok=True)
            libraries = [target / f"{name}.dll" for name in (CPU, CUDA)]
            for name, library in zip((CPU, CUDA), libraries, strict=True):
                shutil.copyfile(dll(cache, name), library)
            info = cross_built_info(plan, cache, libraries)
            (target / commands.INFO).write_text(build_info.text(info), encoding="utf-8", newline="\n")

    dist, work = cache / "dist", cache / "wheel"
    for folder in (dist, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # The commands ask for the plan of the machine they run on; here the machine is Windows.
    commands.the_plan = lambda: plan
    commands.both_wheels = False  # the other one is for every system
    words = ["--quiet", "egg_info", "--egg-base", str(work), "build", "--build-base", str(work / "build")]
    words += ["bdist_wheel", "--dist-dir", str(dist), "--bdist-dir", str(work / "bdist")]
    with in_folder(ROOT), (work / "log.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        setuptools.setup(
            version=plan.version,
            ext_modules=[commands.extension()],
            cmdclass={**commands.COMMANDS, "build_ext": CopyNative},
            script_name="setup.py",
            script_args=words,
        )
    (wheel,) = dist.glob("*.whl")
    return wheel


def build_wheel(plan: Plan, cache: Path) -> str:
    """Assembled, then verified as every wheel is: tag, contents, RECORD, libraries, nothing of this machine."""
    wheel = assemble(plan, cache)
    problems = verify(wheel)
    if wheel.name != plan.wheel:
        problems.insert(0, f"is named otherwise than planned: {plan.wheel}")
    if problems:
        raise GateError("\n".join(f"{wheel.name}: {problem}" for problem in problems))
    return f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB), verified; cross-built, never run on Windows"
