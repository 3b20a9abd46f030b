"""FLOPs of this package's operators in torch's counter."""

from mamba_ssm._torch.flops import register_flops

__all__ = ["register_flops"]
