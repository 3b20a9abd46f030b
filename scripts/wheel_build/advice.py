"""mamba_ssm/_native/advice.py, which holds these once for the package and for scripts. Loaded by its path, because
importing the package needs torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_file = Path(__file__).resolve().parents[2] / "mamba_ssm" / "_native" / "advice.py"
_spec = importlib.util.spec_from_file_location("mamba_ssm_advice", _file)
assert _spec is not None and _spec.loader is not None, _file
_advice = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_advice)

DRIVER_FLOORS: dict[int, int] = _advice.DRIVER_FLOORS
driver_needed = _advice.driver_needed
with_variables = _advice.with_variables
