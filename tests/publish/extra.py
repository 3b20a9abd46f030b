"""Skips the test module that imports it where it cannot run; import it before the scripts, which would exit."""

import importlib.util
import sys

import pytest

NEEDED = ("twine", "pypi_simple", "filelock", "jinja2", "check_wheel_contents", "elftools", "pefile")
NEEDED += ("zstandard", "cyclonedx", "jsonschema")

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f'{", ".join(missing)} not installed here: pip install -e ".[publish]"', allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("starts servers and links environments the way Linux does", allow_module_level=True)
