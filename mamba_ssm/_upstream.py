"""Upstream's triton kernels by name: code that imports one goes on, code that launches one is told what to call."""

import typing
from collections.abc import Callable, Mapping


class TritonKernel:
    """Stands for a triton kernel, which this package does not have."""

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def __repr__(self) -> str:
        return f"<no triton kernel {self.name}: call {self.instead}>"

    def __getitem__(self, grid: object) -> typing.NoReturn:
        self()

    def __call__(self, *arguments: object, **options: object) -> typing.NoReturn:
        raise NotImplementedError(
            f"{self.name} is a triton kernel of upstream's mamba_ssm, and this one has none: call {self.instead}, "
            "which runs native code"
        )


def kernels(module: str, instead: Mapping[str, str]) -> Callable[[str], TritonKernel]:
    """A __getattr__ for the module of this name. instead: what to call for each of upstream's kernels there."""

    def find(name: str) -> TritonKernel:
        if name not in instead:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return TritonKernel(f"{module}.{name}", instead[name])

    return find
