"""The selective scan, Mamba-1's recurrence."""

from mamba_ssm.ops.selective_scan import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.selective_scan.forward import selective_scan_fn
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref

__all__ = ["selective_scan_fn", "selective_scan_ref"]
