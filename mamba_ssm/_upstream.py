"""Upstream's names for what this package does in another way: kernels in triton, and autograd.Functions.

A kernel can be imported; launching it is an error that says what to call. An autograd.Function is a class with the same
apply, forward and backward.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence

import torch


class UpstreamKernel:
    """Stands for a kernel in triton (or another language) which this package does not have."""

    def __init__(self, name: str, language: str, instead: str) -> None:
        self.name, self.language, self.instead = name, language, instead

    def __repr__(self) -> str:
        return f"<no {self.language} kernel {self.name}: call {self.instead}>"

    def __getitem__(self, grid: object) -> typing.NoReturn:
        self()

    def __call__(self, *arguments: object, **options: object) -> typing.NoReturn:
        package = self.name.partition(".")[0]
        raise NotImplementedError(
            f"{self.name} is a {self.language} kernel of upstream's {package}, and this one has none: call "
            f"{self.instead} instead"
        )


def kernels(module: str, instead: Mapping[str, str], language: str = "triton") -> Callable[[str], UpstreamKernel]:
    """A __getattr__ for the module of this name. instead: what to call for each of upstream's kernels there."""

    def find(name: str) -> UpstreamKernel:
        if name not in instead:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return UpstreamKernel(f"{module}.{name}", language, instead[name])

    return find


def init_to_zero(names: Sequence[str]) -> Callable[[Mapping[str, torch.Tensor | None]], list[torch.Tensor]]:
    """A function that zeroes the tensors of these names in a mapping, but those that are None; a pre-hook of triton's
    autotuner has this form.
    """
    return lambda tensors: [tensor.zero_() for tensor in map(tensors.__getitem__, names) if tensor is not None]


class AutogradFunction:
    """One of upstream's autograd.Functions by name. apply is the public function. forward and backward are for code
    that calls them with a ctx of its own: an autograd.Function's, or any object with save_for_backward and
    saved_tensors.

    gradients: how many arguments upstream's forward takes, which is how many gradients its backward returns.
    """

    apply: Callable[..., typing.Any]
    gradients: int

    @classmethod
    def forward(cls, ctx: typing.Any, *arguments: typing.Any, **options: typing.Any) -> typing.Any:
        """apply's result without a gradient; ctx keeps what backward needs."""
        given = inspect.signature(cls.apply).bind(*arguments, **options)
        inputs = {
            name: value.detach().requires_grad_() if _has_gradient(value) else value
            for name, value in given.arguments.items()
        }
        with torch.enable_grad():
            results = cls.apply(**inputs)
        several = isinstance(results, tuple)
        outputs = results if several else (results,)
        differentiable = [
            index for index, output in enumerate(outputs) if _has_gradient(output) and output.requires_grad
        ]
        detached = tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in outputs)
        constant = [
            out for index, out in enumerate(detached) if isinstance(out, torch.Tensor) and index not in differentiable
        ]
        if constant and hasattr(ctx, "mark_non_differentiable"):
            ctx.mark_non_differentiable(*constant)
        # The graph of apply is reached from its outputs alone: it is freed with what ctx has saved.
        wanted = [name for name, value in inputs.items() if _has_gradient(value)]
        ctx.save_for_backward(*(inputs[name] for name in wanted), *(outputs[index] for index in differentiable))
        ctx.of_mamba_ssm = wanted, differentiable
        return detached if several else detached[0]

    @classmethod
    def backward(cls, ctx: typing.Any, *grads: torch.Tensor | None) -> typing.Any:
        """The gradients of forward's arguments in their order, None for those that have none. They have no gradient
        themselves: with the ctx of a torch.autograd.Function, create_graph=True raises RuntimeError. grads: of
        forward's results; those left out, or None, are zero.
        """
        # With another ctx grad mode may be on without a meaning.
        if torch.is_grad_enabled() and isinstance(ctx, torch.autograd.function.BackwardCFunction):
            raise RuntimeError(
                f"{cls.__name__}.backward has no second derivative (create_graph=True) within another "
                f"autograd.Function: call {cls.__name__}.apply in place of the Function"
            )
        wanted, differentiable = ctx.of_mamba_ssm
        saved = ctx.saved_tensors
        inputs, outputs = saved[: len(wanted)], saved[len(wanted) :]
        pairs = [
            (output, grads[index])
            for output, index in zip(outputs, differentiable, strict=True)
            if index < len(grads) and grads[index] is not None
        ]
        found: typing.Any = [None] * len(wanted)
        if pairs and wanted:
            outputs, cotangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
        by_name = dict(zip(wanted, found, strict=True))
        names = list(inspect.signature(cls.apply).parameters)
        count = max([cls.gradients, *(names.index(name) + 1 for name in wanted)])
        results = tuple(by_name.get(name) for name in names[:count])
        return results if count > 1 else results[0]


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
