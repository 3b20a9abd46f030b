"""Writes docs/kernel-tables.md: the tables of CUDA kernels of the build that Python finds. It needs no GPU.

python scripts/kernels_page.py           after a change of csrc/*/kernels.h, with a build of it
"""

from pathlib import Path

from mamba_ssm._doctor.kernels import tables
from mamba_ssm.utils.kernels import kernels

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernel-tables.md"
HEAD = """\
# Tables of CUDA kernels

Written by `scripts/kernels_page.py` from a build; do not edit. A call runs the first kernel of its operator that takes
it: [how to find out which](kernels.md#which-kernel-a-call-runs). `python -m mamba_ssm --kernels` prints those of your
build.

"""


def text() -> str:
    return HEAD + tables(kernels(), None) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8", newline="\n")
