"""`python -m mamba_ssm_doctor`: the doctor of the mamba_ssm beside this file, also where Python finds another first.

`python -m mamba_ssm` runs whatever mamba_ssm comes first on Python's path. No other project has a module of this name.
"""

import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent.resolve()
# Beside this file where a wheel was installed, beside this folder in a checkout.
_FOLDER = next((folder / "mamba_ssm" for folder in (_HERE, _HERE.parent) if (folder / "mamba_ssm").is_dir()), None)


def main(arguments: list[str] | None = None) -> int:
    """Runs the doctor and returns its exit code, which mamba_ssm.__main__ explains. For a process of its own."""
    if _FOLDER is None or not (_FOLDER / "__main__.py").is_file():
        print(
            f"problem     the doctor cannot start: {_FOLDER or _HERE / 'mamba_ssm'} is missing or lacks __main__.py. "
            "Reinstall mamba_ssm."
        )
        return 1
    # The folder without its __init__.py, which needs torch. The doctor runs that when it has looked at the files.
    package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
    package.__path__ = [str(_FOLDER)]
    from mamba_ssm.__main__ import main as examine

    return examine(arguments)


if __name__ == "__main__":
    sys.exit(main())
