"""PEP 517 backend: the wheel of causal-conv1d, from this folder of mamba_ssm's source tree."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from wheel_build import config, convolution  # noqa: E402


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    switch = "SOURCE_DATE_EPOCH"
    source_date = config.parse_source_date(switch, os.environ.get(switch, ""))
    return convolution.build(ROOT, Path(wheel_directory), source_date).name
