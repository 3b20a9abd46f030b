"""Derivatives of operators beyond the first of reverse mode, which has kernels: double backward, forward mode and those
of torch.func.

They come from formulas: functions of an operator's arguments that return its results, made of torch operators and of
others that have such derivatives. extend and extend_backward give them to an operator that is defined.
"""

import functools

import torch
import torch.autograd.forward_ad as forward_ad

from mamba_ssm._torch import private
from mamba_ssm._torch.autocast import no_autocast

FORMULAS = {}  # forward operator -> (its formula, of_operators), see extend
SECOND = {}  # backward operator -> gradients of its arguments, from them, which are needed, and those of its results


def extend(op, formula, of_operators=False):
    """Gives a forward operator forward mode and torch.func.

    of_operators: the formula is made of this package's operators, which have both themselves; else it is plain torch,
    and the results and first gradients still come from kernels.
    """
    FORMULAS[op] = formula, of_operators


def extend_backward(op, formula=None, second=None):
    """Gives a backward operator a derivative, that of its formula, or second(arguments, needed, cotangents)."""
    SECOND[op] = second or (lambda *given: through(formula, *given))


def run(op, arguments):
    """op(*arguments) where a transform of torch.func is active or a tensor carries a tangent."""
    formula, of_operators = FORMULAS.get(op, (op, True))
    return (formula if of_operators else _transformable(op, formula))(*arguments)


def wanted(arguments):
    """Whether a derivative is asked for that kernels' autograd nodes do not have: a transform of torch.func is active,
    or a tensor carries a tangent.
    """
    if private.is_compiling():
        return False
    if private.transforms_active is not None and private.transforms_active():
        return True
    return private.forward_mode_active() and any(has_tangent(given) for given in arguments)


def has_tangent(given):
    """Whether it is a tensor with a derivative in forward mode."""
    return isinstance(given, torch.Tensor) and forward_ad.unpack_dual(given).tangent is not None


def is_vectorized():
    """Whether gradients hide a dimension, as with is_grads_batched=True."""
    return (
        private.VMAP_MODE is not None and private.key_included is not None and private.key_included(private.VMAP_MODE)
    )


def refuse_vectorized(name):
    """For second derivatives that cannot run there."""
    if is_vectorized():
        raise RuntimeError(
            f"{name}: second derivatives do not go with is_grads_batched=True and vectorize=True: use torch.func, such "
            "as torch.func.hessian"
        )


def vjp(function, arguments, cotangents):
    """Gradients of function(*arguments), a tuple, which can be differentiated again: one an argument, None where that
    is no floating-point tensor. Cotangents may be None.
    """
    inputs = [_leaf(given, given.requires_grad) if _is_real(given) else given for given in arguments]
    leaves = [given for given in inputs if _is_real(given)]
    grads = iter(_gradients(function(*inputs), leaves, cotangents, create_graph=True))
    return [next(grads) if _is_real(given) else None for given in inputs]


def through(formula, arguments, needed, cotangents):
    """Gradients of formula(*arguments), a tuple: one an argument, None where not needed. With grad mode on, as in a
    backward with create_graph=True, they can be differentiated again.
    """
    again = torch.is_grad_enabled()
    like = next(given for given in arguments if isinstance(given, torch.Tensor))
    with torch.enable_grad(), no_autocast(like):
        pairs = zip(arguments, needed, strict=True)
        inputs = [_leaf(given, again) if need else _constant(given, again) for given, need in pairs]
        leaves = [given for given, need in zip(inputs, needed, strict=True) if need]
        grads = iter(_gradients(formula(*inputs), leaves, cotangents, create_graph=again))
    return [next(grads) if need else None for need in needed]


def _leaf(tensor, connected):
    """A tensor of its own for autograd, so that one that is given twice has two gradients."""
    return tensor.view_as(tensor) if connected else tensor.detach().requires_grad_()


def _constant(given, connected):
    return given.detach() if isinstance(given, torch.Tensor) and not connected else given


def _gradients(results, leaves, cotangents, create_graph):
    found = [
        (result, cotangent)
        for result, cotangent in zip(results, cotangents, strict=True)
        if result is not None and cotangent is not None and result.requires_grad
    ]
    grads = [None] * len(leaves)
    if found:
        outputs, weights = zip(*found, strict=True)
        grads = torch.autograd.grad(outputs, leaves, weights, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


def _is_real(given):
    return isinstance(given, torch.Tensor) and given.is_floating_point()


class Again:
    """What a block's autograd node, which keeps what it has computed from its inputs, needs to be differentiated twice:
    the inputs themselves. The first, an activation, only where the node keeps it anyway; the others are parameters.
    """

    __slots__ = "is_cast", "parameters", "versions"

    def __init__(self, inputs, kept):
        """kept: the first input as the node keeps it, or None."""
        self.is_cast = kept is not None and kept is not inputs[0]
        self.parameters = inputs[1:]
        self.versions = [0 if tensor is None else tensor._version for tensor in self.parameters]

    def gradients(self, function, needed, first, cotangents):
        """Those of function(*inputs), a tuple, which can be differentiated. first: as kept, None where it was not."""
        for tensor, version in zip(self.parameters, self.versions, strict=True):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "a parameter needed for a gradient with create_graph=True has been modified by an inplace "
                    f"operation since forward: it has shape {tuple(tensor.shape)}"
                )
        if first is None or self.is_cast:
            reason = "autocast has cast its input" if self.is_cast else "in_proj.weight is frozen"
            raise RuntimeError(
                f"the gradient of this layer cannot be differentiated (create_graph=True) where {reason}, since it has "
                "not kept the input: set use_fast_path=False (Mamba) or use_mem_eff_path=False (Mamba2); Mamba3's "
                "gradient cannot be in any case"
            )
        return through(function, (first, *self.parameters), needed, cotangents)


# ---- torch.func ------------------------------------------------------------------------------------------------------


@functools.cache  # made when it is first used, not at import
def _transformable(op, formula):
    """op for torch.func: an autograd.Function with a setup_context, a jvp and a vmap, and one for its gradient.

    vmap runs one entry after the other: a kernel's parameters have no batch dimension.
    """
    count = len(op._schema.returns)

    def results(*arguments):
        found = op(*arguments)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    def plain(*arguments):
        found = formula(*arguments)
        return found if isinstance(found, tuple) else (found,)

    def first(wanted, *given):
        """The gradients of the wanted arguments by the formula; what torch.func differentiates again."""
        cotangents, arguments = given[:count], given[count:]

        def run(*leaves):
            outputs = plain(*filled(arguments, wanted, leaves))
            return tuple(out for out, cotangent in zip(outputs, cotangents, strict=True) if cotangent is not None)

        _, pull = torch.func.vjp(run, *taken(arguments, wanted))
        return pull(tuple(cotangent for cotangent in cotangents if cotangent is not None))

    class Gradient(_Mapped):
        """first by the kernels."""

        @staticmethod
        def forward(wanted, *given):
            cotangents, arguments = given[:count], given[count:]
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in taken(arguments, wanted)]
                outputs = results(*filled(arguments, wanted, leaves))
                return tuple(_gradients(outputs, leaves, cotangents, create_graph=False))

        @staticmethod
        def backward(ctx, *cotangents):
            (wanted, *given), real = ctx.arguments(), ctx.needs_input_grad[1:]
            leaves = taken(given, real)
            _, pull = torch.func.vjp(lambda *leaves: first(wanted, *filled(given, real, leaves)), *leaves)
            grads = iter(pull(cotangents))
            return None, *(next(grads) if need else None for need in real)

        @staticmethod
        def jvp(ctx, _, *tangents):
            wanted, *given = ctx.arguments()
            return _push(lambda *given: first(wanted, *given), given, tangents)

    class Operator(_Mapped):
        @staticmethod
        def forward(*arguments):
            return results(*arguments)

        @staticmethod
        def backward(ctx, *cotangents):
            wanted = ctx.needs_input_grad
            grads = iter(Gradient.apply(bytes(wanted), *cotangents, *ctx.arguments()))
            return tuple(next(grads) if need else None for need in wanted)

        @staticmethod
        def jvp(ctx, *tangents):
            return _push(plain, ctx.arguments(), tangents)

    def run(*arguments):
        outputs = Operator.apply(*arguments)
        return outputs if count > 1 else outputs[0]

    return run


class _Mapped(torch.autograd.Function):
    """Saves all of its arguments; under vmap it runs for one entry after the other."""

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        is_tensor = [isinstance(given, torch.Tensor) for given in inputs]
        others = [None if tensor else given for given, tensor in zip(inputs, is_tensor, strict=True)]
        tensors = taken(inputs, is_tensor)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.arguments = lambda: filled(others, is_tensor, ctx.saved_tensors)

    @classmethod
    def vmap(cls, info, in_dims, *arguments):
        found = []
        for entry in range(info.batch_size):
            dims = zip(arguments, in_dims, strict=True)
            found.append(cls.apply(*(given if dim is None else given.select(dim, entry) for given, dim in dims)))
        stacked = [None if parts[0] is None else torch.stack(parts) for parts in zip(*found, strict=True)]
        return tuple(stacked), tuple(None if out is None else 0 for out in stacked)


def taken(given, which):
    return [one for one, take in zip(given, which, strict=True) if take]


def filled(given, which, taken):
    taken = iter(taken)
    return [next(taken) if take else one for one, take in zip(given, which, strict=True)]


def _push(function, given, tangents):
    """The tangents of function(*given), a tuple, from those of given. None: of no tensor, or zero."""
    moving = [tangent is not None for tangent in tangents]
    there = []

    def moved(*leaves):
        results = function(*filled(given, moving, leaves))
        there[:] = [result is not None for result in results]
        return tuple(result for result in results if result is not None)

    leaves, directions = tuple(taken(given, moving)), tuple(taken(tangents, moving))
    if private.transforms_active is not None and private.transforms_active():
        _, pushed = torch.func.jvp(moved, leaves, directions)
    else:  # forward_ad cannot be nested; but the gradient, linear in its cotangents, can be differentiated by them
        results, pull = torch.func.vjp(moved, *leaves)
        _, pull_again = torch.func.vjp(pull, tuple(torch.zeros_like(result) for result in results))
        (pushed,) = pull_again(directions)
    return tuple(filled([None] * len(there), there, pushed))
