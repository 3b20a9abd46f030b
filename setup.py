"""Builds mamba_ssm: all decisions are in scripts/wheel_build, this file only hands over.

python setup.py bdist_wheel          the wheel, in dist/
python setup.py configure            what would be built, and what stands in its way; builds nothing
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
NEEDS = 'pip install "setuptools>=77" cmake ninja packaging'

if sys.version_info < (3, 10):  # noqa: UP036  (pip checks this, a plain call of setup.py does not)
    sys.exit(f"mamba_ssm needs Python 3.10 or newer; this is {sys.version.split()[0]}")

if sys.argv[1:2] == ["configure"]:
    from wheel_build import configure

    sys.exit(configure.main(ROOT, sys.argv[2:]))

try:
    import setuptools
except ImportError:
    sys.exit(f"setup.py needs setuptools 77 or newer, which is not installed here; do: {NEEDS}")

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"setup.py needs setuptools 77 or newer, and this is {setuptools.__version__}; do: {NEEDS}")

from wheel_build import commands, version  # noqa: E402  (after the checks that they need)

setuptools.setup(
    version=version.base_version(ROOT),
    ext_modules=[commands.extension()],
    cmdclass=commands.COMMANDS,
    distclass=commands.Package,
)
