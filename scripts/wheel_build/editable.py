"""What an editable install compiles for: the machine that it is on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .advice import with_variables
from .architectures import dotted
from .config import Config
from .facts import Facts


def _word_for(gpu: int, known: Sequence[int]) -> str:
    """What TORCH_CUDA_ARCH_LIST says for a GPU of this compute capability, "" if this nvcc is too new for it.

    For a GPU that is newer than this nvcc it is the newest architecture before it: GPUs run machine code of an earlier
    minor version of their major one, and the PTX of earlier major ones.
    """
    earlier = [number for number in known if number <= gpu]
    if not earlier:
        return ""
    newest = max(earlier)
    return dotted(newest) + ("" if newest // 10 == gpu // 10 else "+PTX")


def for_this_machine(config: Config, seen: Facts) -> tuple[Config, str]:
    """The switches as the machine fills them in, and one line that says how, with the switches that change it.

    A switch that the user set stays: then the line is "". So it is with MAMBA_SSM_CUDA=on and no GPU, which means all
    architectures. A driver without nvcc stays what it is for a wheel, an error: its GPU would go unused.
    """
    if config.arch_list or config.cuda == "off":
        return config, ""
    variable = lambda name, value: with_variables(seen.platform, **{name: value})  # noqa: E731
    if seen.gpus:
        words = [word for word in (_word_for(number, seen.nvcc_architectures) for number in seen.gpus) if word]
        if seen.discovery.nvcc is None:
            return config, ""
        if not words:  # an error, which names what this nvcc can compile
            return replace(config, arch_list="native"), ""
        found = ", ".join(dotted(number) for number in seen.gpus)
        unknown = [dotted(number) for number in seen.gpus if number not in seen.nvcc_architectures]
        if unknown:
            found += f", by {', '.join(words)}, since this nvcc does not know {', '.join(unknown)}"
        line = (
            f"for the GPU of this machine, {found} ({variable('TORCH_CUDA_ARCH_LIST', '8.6')}, for example, is "
            f"for another one, {variable('MAMBA_SSM_CUDA', 'off')} for the CPU alone)"
        )
        return replace(config, arch_list=";".join(dict.fromkeys(words))), line
    if config.cuda == "on" or (seen.driver and seen.discovery.nvcc is None):
        return config, ""
    line = (
        f"for the CPU alone: the build saw no GPU ({variable('TORCH_CUDA_ARCH_LIST', '9.0')}, for example, is for a "
        f"GPU, {variable('MAMBA_SSM_CUDA', 'on')} for all)"
    )
    return replace(config, cuda="off"), line
