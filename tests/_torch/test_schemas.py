"""The operators' schemas stay: torch's compile caches, which outlive an upgrade, know operators by name alone."""

from pathlib import Path

import torch

import mamba_ssm  # noqa: F401  (registers the operators)
from mamba_ssm._torch import registration

KEPT = Path(__file__).with_name("schemas.txt")


def test_a_changed_schema_has_a_new_name():
    """A new operator is a new line of schemas.txt. One that must change takes another name, and so another line, unless
    all that it gets is a last argument with a default, which old programs do without.
    """
    found = sorted(str(op._schema) for op in registration.IMPLEMENTATIONS)
    assert found == KEPT.read_text(encoding="utf-8").splitlines(), torch.__version__
