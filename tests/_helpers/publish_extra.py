"""Skips the test module that imports it where the scripts lack their extra; import it before them."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("starts servers and links environments the way Linux does", allow_module_level=True)
try:
    import make_index  # noqa: F401
    import publish  # noqa: F401
except ModuleNotFoundError as error:
    pytest.skip(f'{error.name} is not installed here: pip install "WHEEL[publish]"', allow_module_level=True)
