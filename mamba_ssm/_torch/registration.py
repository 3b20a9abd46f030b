"""Registers operators with torch.library: one pattern for all of them.

An operator has a schema, an implementation for CPU and CUDA, a fake, and an Autograd kernel that costs little when no
gradient is needed. Absent optional tensors are None on the way in and on the way out. Its last arguments may be
False or None by default: the dispatcher drops trailing defaults, and here they are given again.
"""

import re
import warnings

import torch

from mamba_ssm._torch import derivatives, flops, private
from mamba_ssm._torch.plans import Planned
from mamba_ssm._torch.registry import LATEST, LIBRARY, SCHEMAS, defaults_of
from mamba_ssm._torch.watching import watched

IMPLEMENTATIONS = {}  # operator -> its implementation
PLANNED = {}  # operator, or name of a function of several, -> its implementation by plans, if it has them
FUNCTIONS = {}  # operator -> its autograd.Function, if it has one
_DECLARED = {}  # operator -> [(kind, name)] of its arguments
_CALLED = {}  # operator -> its name in errors, which is the function's that users call
_BELOW = {}  # operator -> the same without an Autograd kernel, on a torch that cannot skip it


def define(schema, implementation, fake, autograd=None, differentiable=True, called=None, planned=None):
    """Defines mamba_ssm::<schema> and returns its callable overload.

    implementation: runs on CPU and CUDA tensors. fake: same arguments, same checks, allocates outputs only.
    autograd: an autograd.Function that takes the operator's arguments and returns its outputs; its forward calls
    the operator with call_below_autograd. None with differentiable=True (backward operators): the result's backward is
    what derivatives.extend_backward says, else it raises. differentiable=False: operators that write in place, whose
    result has no gradient; a warning says so where an input requires one. called: the operator's name in errors, where
    it is not the schema's. planned: of operators that only allocate and make native calls, what their implementation
    reads beside its arguments, as functions of none; such calls are made by plans (see plans.py).
    """
    name, arguments = re.match(r"(\w+)\((.*?)\) ->", schema).groups()
    declared = [tuple(argument.partition("=")[0].split(" ")) for argument in arguments.split(", ")]
    by_plan = Planned(implementation, planned) if planned is not None and private.MODES_KNOWN else None
    kernel = implementation if by_plan is None else _kernel(by_plan)
    op = _define(name, schema, kernel, fake)
    flops.remember(getattr(torch.ops.mamba_ssm, name), [argument for _, argument in declared])
    if private.below_autograd is None:
        below = f"{name}_below_autograd"
        _BELOW[op] = _define(below, schema.replace(name, below, 1), kernel, fake)
        flops.remember(getattr(torch.ops.mamba_ssm, below), [argument for _, argument in declared])
    _DECLARED[op] = declared
    IMPLEMENTATIONS[op] = implementation
    if by_plan is not None:
        PLANNED[op] = by_plan
    _CALLED[op] = called or name
    if autograd is not None:
        FUNCTIONS[op] = autograd
    _impl(name, "Autograd", _autograd_kernel(name, op, autograd, differentiable, by_plan))
    return op


def define_without_autograd(schema, implementation, fake):
    """The same of an operator that is called where no gradient is recorded: in the forward or backward of a node."""
    return _define(schema.partition("(")[0], schema, implementation, fake)


def _kernel(by_plan):
    """What torch's dispatcher runs, as compiled programs have it do: the implementation, by its plans if nothing
    watches.
    """

    def kernel(*arguments):
        results = None if watched() else by_plan(arguments)
        return by_plan.implementation(*arguments) if results is None else results

    return kernel


def _define(name, schema, implementation, fake):
    if SCHEMAS.setdefault(name, schema) != schema:
        raise ImportError(
            f"another version of mamba_ssm was imported before in this process, whose operator {name} has other "
            "arguments: restart Python"
        )
    if not hasattr(torch.ops.mamba_ssm, name):
        pt2_compliant = {"tags": (torch.Tag.pt2_compliant_tag,)} if hasattr(torch.Tag, "pt2_compliant_tag") else {}
        LIBRARY.define(schema, **pt2_compliant)
    _impl(name, "CPU", implementation)
    _impl(name, "CUDA", implementation)
    _impl(name, "fake", fake)
    return getattr(torch.ops.mamba_ssm, name).default


def _impl(name, key, function):
    """Has torch call function for mamba_ssm::name: from its dispatcher under key, or as its fake."""
    known = (name, key) in LATEST
    LATEST[name, key] = function
    if known:
        return

    defaults = defaults_of(name)

    def latest(*arguments):
        return LATEST[name, key](*arguments, *defaults[len(arguments) :])

    if key == "fake":

        def fake(*arguments):
            private.take_as_it_is(getattr(torch.ops.mamba_ssm, name).default)
            return latest(*arguments)

        # impl_abstract: before torch 2.4
        register_fake = getattr(torch.library, "register_fake", None) or torch.library.impl_abstract
        register_fake(f"mamba_ssm::{name}", fake, lib=LIBRARY)
    else:
        LIBRARY.impl(name, latest, key)


if private.below_autograd is None:

    def redispatch(op, arguments):
        """op(*arguments) through the dispatcher, without op's Autograd kernel."""
        return _BELOW[op](*arguments)

else:

    def redispatch(op, arguments):
        """op(*arguments) through the dispatcher, without op's Autograd kernel."""
        with private.below_autograd():
            return op(*arguments)


def no_second_derivatives(name):
    return (
        f"{name} cannot be differentiated: it has no second derivative (create_graph=True) by kernels; within "
        "mamba_ssm.utils.reference.plain_torch() it has"
    )


def _autograd_kernel(name, op, function, differentiable, by_plan):
    if function is None and differentiable:
        function = _differentiated_again(name, op)

    def kernel(*arguments):
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    if private.transforms_active is not None and private.transforms_active():
                        raise RuntimeError(
                            f"mamba_ssm::{name} does not work with torch.func transforms (grad, vjp, jacrev, ...): "
                            "call the public function, or use torch.autograd.grad or .backward(), or call within "
                            "mamba_ssm.utils.reference.plain_torch()"
                        )
                    _refuse_dual_tensors(name, arguments)
                    return function.apply(*arguments) if differentiable else _detached(name, op, arguments)
        if by_plan is not None and not watched():  # as compiled programs call it: the dispatcher has no more to say
            results = by_plan(arguments)
            if results is not None:
                return results
        _refuse_dual_tensors(name, arguments)
        return redispatch(op, arguments)

    return kernel


def _detached(name, op, arguments):
    """The result, without a gradient, of an operator that writes in place. Tensors that it wrote to and that require a
    gradient are reported to autograd: their values no longer depend on what they were computed from.
    """
    warnings.warn(
        f"{_CALLED[op]} writes in place and has no gradient: its result is detached, though an input requires one. To "
        "decode, call it under torch.no_grad() or torch.inference_mode(), which also saves memory",
        stacklevel=7,  # the caller of the public function
    )
    given = dict(zip(_DECLARED[op], arguments, strict=True))
    tracked = {
        key: tensor for key, tensor in given.items() if "!" in key[0] and tensor is not None and tensor.requires_grad
    }
    for (_, argument), tensor in tracked.items():
        if tensor.is_leaf:
            raise RuntimeError(
                f"{_CALLED[op]}: {argument} is a leaf Variable that requires grad, which cannot be written in place: "
                "give a tensor that requires none, or call it under torch.no_grad()"
            )
    with torch.no_grad():
        copies = {key: tensor.clone() for key, tensor in tracked.items()}
    out = redispatch(op, tuple((given | copies).values()))
    for key, tensor in tracked.items():
        tensor.copy_(copies[key])
    return out


def _differentiated_again(name, op):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            ctx.is_tensor = [isinstance(given, torch.Tensor) for given in arguments]
            ctx.others = [None if tensor else given for given, tensor in zip(arguments, ctx.is_tensor, strict=True)]
            ctx.save_for_backward(*derivatives.taken(arguments, ctx.is_tensor))
            ctx.set_materialize_grads(False)
            return redispatch(op, arguments)

        @staticmethod
        def backward(ctx, *grads):
            second = derivatives.SECOND.get(op)
            if second is None:
                raise RuntimeError(no_second_derivatives(f"mamba_ssm::{name}"))
            arguments = derivatives.filled(ctx.others, ctx.is_tensor, ctx.saved_tensors)
            return tuple(second(arguments, ctx.needs_input_grad, grads))

    return Again


def _refuse_dual_tensors(name, arguments):
    """Forward-mode derivatives would be lost in silence: the kernels do not carry tangents."""
    if not private.forward_mode_active():
        return
    for argument in arguments:
        if derivatives.has_tangent(argument):
            raise NotImplementedError(
                f"mamba_ssm::{name} has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp): call "
                "the public function, or use reverse mode, or call within mamba_ssm.utils.reference.plain_torch()"
            )


# ---- what is no dense tensor -----------------------------------------------------------------------------------------


def refuse_what_is_no_dense_tensor(name, tensors):
    """Names the one of the tensors (by argument; None where absent) that has failed for being no tensor, or one without
    strides and memory of its own. Only on the way out of a failure, so that calls that succeed do not pay for it.
    """
    for argument, given in tensors.items():
        if given is not None and not isinstance(given, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a torch.Tensor, got {type(given).__name__}") from None
        if given is not None and (given.layout != torch.strided or given.is_nested or given.is_quantized):
            kind = "a nested tensor" if given.is_nested else given.layout
            kind = "a quantized tensor" if given.is_quantized else kind
            raise TypeError(f"{name}: {argument} must be a dense tensor, got {kind}") from None


def refuse_arguments_that_are_not_dense(op, arguments):
    """The same for an operator's arguments, which may also be missing, or written in place."""
    name = _CALLED[op]
    for (kind, argument), given in zip(_DECLARED[op], arguments, strict=True):
        if not kind.startswith("Tensor") or (given is None and kind.endswith("?")):
            continue
        if given is None:
            raise TypeError(f"{name}: {argument} must be a torch.Tensor, got NoneType") from None
        refuse_what_is_no_dense_tensor(name, {argument: given})
        if "!" in kind and given.is_neg():
            raise ValueError(
                f"{name}: {argument} is written in place and cannot be a negated view: use .resolve_neg()"
            ) from None
