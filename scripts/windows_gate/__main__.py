"""The Windows gate: builds and tests the kernels for Windows on Linux. Run as `python scripts/windows_gate`.

Compiles all CUDA sources with NVIDIA's own nvcc.exe in Microsoft mode and the CPU sources with clang-cl and mingw-w64,
links mamba_cuda.dll and mamba_cpu.dll, looks into them, runs them under Wine and assembles a win_amd64 wheel.
docs/windows-gate.md says what that proves and what it does not. The build switches of setup.py are read
(TORCH_CUDA_ARCH_LIST, MAX_JOBS, ...). Installs Debian packages, as root or by sudo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # in place of this folder, whose modules are those of a package

try:
    from windows_gate import broken, cross_wheel, gate, toolchain
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith(("windows_gate", "wheel_")):
        raise
    wanted = 'pip install "setuptools>=77" cmake ninja, and the packages of the extra "publish" in pyproject.toml'
    sys.exit(f"windows_gate needs {error.name}, which is not installed here; do: {wanted}")

STAGES = {
    "mamba_cuda.dll": gate.build_cuda,
    "CPU sources in Microsoft mode": gate.check_cpu,
    "mamba_cpu.dll": gate.build_cpu,
    "what the DLLs hold": gate.check_dlls,
    "self-test under Wine": gate.self_test,
    "native tests under Wine": gate.native_tests,
    "wheel": cross_wheel.build_wheel,
}
IMPOSSIBLE = 77  # as the native tests say "skipped"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["run", "selftest", "setup"],
        default="run",
        help="run: all stages (the default). selftest: each stage must catch what is planted for it, after a run. "
        "setup: fetch and install only",
    )
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / "build" / "windows_gate", metavar="FOLDER")
    parser.add_argument(
        "--cuda", default=toolchain.DEFAULT_CUDA, metavar="X.Y", help="of NVIDIA's Windows wheels, 13.0 or newer"
    )
    options = parser.parse_args(words)
    cache, start = options.cache.resolve(), time.monotonic()

    def say(text: str) -> None:
        first, *rest = text.splitlines()
        print(f"[{time.monotonic() - start:4.0f} s] {first}", *rest, sep="\n         ", flush=True)

    try:
        say(f"tools: {toolchain.set_up(cache, options.cuda)}")
        if options.command == "setup":
            return 0
        plan = gate.make_windows_plan(cache, dict(os.environ))
        if options.command == "selftest":
            return broken.main(plan, cache, say)
        for name, stage in STAGES.items():
            say(f"{name}: {gate.with_second_try(name, partial(stage, plan, cache), say)}")
    except toolchain.NotPossible as error:
        say(f"SKIPPED: the Windows gate cannot run here: {error}")
        return IMPOSSIBLE
    except toolchain.GateError as error:
        say(f"FAILED: {error}")
        return 1
    say("the Windows gate is passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
