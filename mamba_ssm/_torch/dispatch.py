"""How operators are called: past the dispatcher where nothing needs it, which costs as much as a small kernel."""

import functools

import torch

from mamba_ssm._torch import derivatives, private, reference
from mamba_ssm._torch.plans import Planned, are_plain
from mamba_ssm._torch.private import is_compiling, is_traced
from mamba_ssm._torch.registration import (
    FUNCTIONS,
    IMPLEMENTATIONS,
    PLANNED,
    no_second_derivatives,
    redispatch,
    refuse_arguments_that_are_not_dense,
)
from mamba_ssm._torch.watching import watched

_TENSOR = torch.Tensor
FUNCTIONS_BY_PLANS = {}  # name -> what `planned` has made


def call(op, *arguments):
    """op(*arguments) for public functions: straight to the implementation, or to autograd with no dispatcher before it.

    Whatever may need the dispatcher (a dual tensor, torch.func, a tracer, a profiler) takes the usual way.
    """
    if watched():
        return derivatives.run(op, arguments) if derivatives.wanted(arguments) else op(*arguments)
    try:
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, _TENSOR) and argument.requires_grad:
                    function = FUNCTIONS.get(op)
                    return op(*arguments) if function is None else apply(function, *arguments)
        return _implementation(op, arguments)
    except (AttributeError, RuntimeError):
        refuse_arguments_that_are_not_dense(op, arguments)
        raise


def call_below_autograd(op, *arguments):
    """op(*arguments) without its Autograd kernel, for the forward of its autograd.Function.

    Plain CPU and CUDA tensors go straight to the implementation, unless something watches.
    """
    seen = watched()
    if seen and is_compiling():
        return op(*arguments)
    try:
        return redispatch(op, arguments) if seen else _implementation(op, arguments)
    except (AttributeError, RuntimeError):
        refuse_arguments_that_are_not_dense(op, arguments)
        raise


def _implementation(op, arguments):
    """The implementation's results, by a plan where there is one; nothing watches."""
    planned = PLANNED.get(op)
    if planned is not None:
        results = planned(arguments)
        if results is not None:
            return results
    if are_plain(arguments):
        return IMPLEMENTATIONS[op](*arguments)
    return redispatch(op, arguments)


def call_in_backward(op, *arguments):
    """op(*arguments) in the backward of an autograd.Function; its Autograd kernel matters only to create_graph=True."""
    if is_compiling() or torch.is_grad_enabled():
        return op(*arguments)
    if may_be_batched():
        return redispatch(op, arguments)
    return call_below_autograd(op, *arguments)


def planned(name, implementation, reads=()):
    """A function of several operators and torch's products by plans, as an autograd.Function's forward calls it: with
    gradients off. Its arguments are tensors and settings. It calls operators by call_below_autograd, or, if it serves
    a backward, by call_in_backward. name: of its plans. reads: see registration.define.
    """
    if private.MODES_KNOWN:
        PLANNED[name] = Planned(implementation, reads)

    def run(*arguments):
        if not watched() and name in PLANNED and not torch.is_grad_enabled() and not may_be_batched():
            results = PLANNED[name](arguments)
            if results is not None:
                return results
        return implementation(*arguments)

    FUNCTIONS_BY_PLANS[name] = run
    return run


def may_be_batched():
    """Whether gradients may be batched: is_grads_batched=True, jacobian(vectorize=True)."""
    return private.VMAP_MODE is None or private.key_included is None or private.key_included(private.VMAP_MODE)


def apply(function, *arguments):
    """function.apply(*arguments) of an autograd.Function, without what torch.autograd.Function.apply puts around it for
    torch.func, a quarter of its time. For callers that know that no such transform is active.
    """
    if is_compiling() or not private.PLAIN_APPLY:
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)


def exported_by_dynamo():
    """Whether torch.export(strict=True) is tracing, on a torch that then keeps an autograd.Function as a node: 2.6 and
    2.7 fail at one with dynamic sizes, and later ones wrap it so that the program has no gradients.
    """
    return private.EXPORT_KEEPS_NODES and is_compiling() and private.dynamo_exports()


def wants_one_node(tensors):
    """Whether a gradient is wanted and an autograd.Function of several operators can give it. Exported programs
    and torch.jit.trace write operators down, and cannot write down a node of Python; the compiler of torch 2.2 and 2.3
    follows few of them. Under torch.func the operators themselves say that they have no such derivative.
    """
    if reference.on or not torch.is_grad_enabled():
        return False
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return False
    if is_compiling():
        return private.SINCE_2_4 and not exported_by_dynamo()
    return private.ALL_KNOWN and private.tracing_state() is None and not private.transforms_active()


def refuse_second_derivatives(name):
    """For the backward of a node that keeps what its forward has computed: no graph leads from there to the node's
    inputs, so that create_graph=True would leave out terms without a word.
    """
    if torch.is_grad_enabled() and not is_traced():
        raise RuntimeError(no_second_derivatives(name))


def outside_graphs(function):
    """torch.compiler.disable(function), made at the first call that is compiled.

    It loads the compiler, which takes a second and, with a process group there, keeps that group beyond
    destroy_process_group: gloo's threads then run when the process ends, and may abort it.
    """
    made = []

    @functools.wraps(function)
    def outside(*arguments):
        if not made:
            if not is_compiling():
                return function(*arguments)
            made.append(torch.compiler.disable(function))
        return made[0](*arguments)

    return outside
