"""What can be imported from where, as tests/compat/names.txt has it."""

from pathlib import Path

PATHS: dict[str, list[str]] = {}  # module -> names
KERNELS: dict[str, list[str]] = {}  # module -> names of triton kernels

for _line in (Path(__file__).parents[1] / "compat" / "names.txt").read_text(encoding="utf-8").splitlines():
    if _line.startswith("mamba_ssm"):
        _module = _line
        PATHS[_module], KERNELS[_module] = [], []
    elif _line.startswith("    ("):
        KERNELS[_module].append(_line.strip(" ()"))
    elif _line.startswith("    "):
        PATHS[_module].append(_line.strip())
