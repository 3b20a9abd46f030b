"""Selective state space models: Mamba's operators, modules and language models on prebuilt CPU and CUDA kernels.

Importing loads no kernel library and needs no GPU: the CPU kernels are loaded by the first call, the CUDA kernels by
the first CUDA tensor. `python -m mamba_ssm` checks the installation.
"""

import sys

# `python -m mamba_ssm` imports this first, and has to say what is wrong where torch or a file of the package is
# missing. The doctor runs this file again when it has looked at the files.
if not (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("mamba_ssm", "-mmamba_ssm")):
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"mamba_ssm needs torch 2.2 or newer, which {sys.executable} does not have; do: pip install torch",
            name="torch",
        ) from None

    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from mamba_ssm.modules.bimamba2 import BiMamba2
    from mamba_ssm.modules.hydra import Hydra
    from mamba_ssm.modules.mamba2 import Mamba2
    from mamba_ssm.modules.mamba3 import Mamba3
    from mamba_ssm.modules.mamba_simple import Mamba
    from mamba_ssm.modules.quantized import quantize
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
    from mamba_ssm.utils.hf import CheckpointError
    from mamba_ssm.version import __version__

__all__ = [
    "BiMamba2",
    "CheckpointError",
    "Hydra",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MambaLMHeadModel",
    "__version__",
    "mamba_inner_fn",
    "quantize",
    "selective_scan_fn",
]
