"""Registers this package's operators with torch.library: one pattern for all of them.

An operator has a schema without default values (the dispatcher drops trailing defaults, and the kernels count on every
argument), an implementation for CPU and CUDA, a fake, and an Autograd kernel that costs little when no gradient is
needed. Absent optional tensors are None on the way in and on the way out.
"""

import torch
import torch.autograd.forward_ad as forward_ad

_LIBRARY = torch.library.Library("mamba_ssm", "DEF")
_FUNCTIONS = {}  # the autograd.Function of each operator that has one
_IMPLEMENTATIONS = {}  # the implementation of each operator
_below_autograd = torch._C._AutoDispatchBelowAutograd
_transforms_active = torch._C._are_functorch_transforms_active
# Not torch.compiler.is_compiling on torch 2.2 and 2.3: their tracer does not know it.
is_compiling = torch.compiler.is_compiling if hasattr(torch, "get_autocast_dtype") else torch._utils.is_compiling
_increment_version = torch.autograd.graph.increment_version
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_profiling = torch.autograd._profiler_enabled
_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_VMAP_MODE = torch._C._parse_dispatch_key("VmapMode")
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_EXPORT_KEEPS_NODES = hasattr(torch.compiler, "set_stance")  # torch 2.6


def _dynamo_exports():
    """The tracer's word: torch.compiler.is_exporting is missing in 2.6, and true for torch.compile in 2.7 and 2.8."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().export)
    except AttributeError:  # compiled or exported by another tracer
        return False


# As torch.compiler.assume_constant_result does, which would import the whole compiler now.
_dynamo_exports._dynamo_marked_constant = True


def exported_by_dynamo():
    """Whether torch.export(strict=True) is tracing, on a torch that then keeps an autograd.Function as a node: 2.6 and
    2.7 fail at one with dynamic sizes, and later ones wrap it so that the program has no gradients.
    """
    return _EXPORT_KEEPS_NODES and is_compiling() and _dynamo_exports()


def wants_one_node(tensors):
    """Whether a gradient is wanted and an autograd.Function of several operators can give it. Exported programs
    and torch.jit.trace write operators down, and cannot write down a node of Python; the compiler of torch 2.2 and 2.3
    follows few of them. Under torch.func the operators themselves say that they have no such derivative.
    """
    if not torch.is_grad_enabled() or not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return False
    if is_compiling():
        return hasattr(torch, "get_autocast_dtype") and not exported_by_dynamo()
    return _tracing_state() is None and not _transforms_active()


def apply(function, *arguments):
    """function.apply(*arguments) of an autograd.Function, without what torch.autograd.Function.apply puts around it for
    torch.func, a quarter of its time. For callers that know that no such transform is active.
    """
    if is_compiling():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)


def define(schema, implementation, fake, autograd=None, differentiable=True):
    """Defines mamba_ssm::<schema> and returns its callable overload.

    implementation: runs on CPU and CUDA tensors. fake: same arguments, same checks, allocates outputs only.
    autograd: an autograd.Function that takes the operator's arguments and returns its outputs; its forward calls
    the operator with call_below_autograd. None with differentiable=True: a derivative was never meant to be taken again
    (backward operators): the result's backward raises. differentiable=False: operators that write in place, which
    refuse inputs that require a gradient.
    """
    name = schema.partition("(")[0]
    pt2_compliant = {"tags": (torch.Tag.pt2_compliant_tag,)} if hasattr(torch.Tag, "pt2_compliant_tag") else {}
    _LIBRARY.define(schema, **pt2_compliant)
    _LIBRARY.impl(name, implementation, "CPU")
    _LIBRARY.impl(name, implementation, "CUDA")
    register_fake = getattr(torch.library, "register_fake", None)
    if register_fake is not None:
        register_fake(f"mamba_ssm::{name}", fake, lib=_LIBRARY)
    else:  # before torch 2.4
        torch.library.impl_abstract(f"mamba_ssm::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.mamba_ssm, name).default
    _IMPLEMENTATIONS[op] = implementation
    if autograd is not None:
        _FUNCTIONS[op] = autograd
    _LIBRARY.impl(name, _autograd_kernel(name, op, autograd, differentiable), "Autograd")
    return op


def call(op, *arguments):
    """op(*arguments), past the dispatcher where nobody watches it: it costs as much as a small kernel.

    For public functions. Whatever may need the dispatcher (a dual tensor, torch.func, a tracer, a profiler) takes the
    usual way.
    """
    if watched() or forward_ad._current_level >= 0:
        return op(*arguments)
    try:
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    function = _FUNCTIONS.get(op)
                    return op(*arguments) if function is None else apply(function, *arguments)
        if _all_plain(arguments):
            return _IMPLEMENTATIONS[op](*arguments)
        with _below_autograd():
            return op(*arguments)
    except (AttributeError, RuntimeError):
        _refuse_what_is_no_dense_tensor(op, arguments)
        raise


def refuse_what_is_no_dense_tensor(name, tensors):
    """Names the one of the tensors (by argument; None where absent) that has failed for being no tensor, or one without
    strides and memory of its own. Only on the way out of a failure, so that calls that succeed do not pay for it.
    """
    for argument, given in tensors.items():
        if given is not None and not isinstance(given, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a torch.Tensor, got {type(given).__name__}") from None
        if given is not None and (given.layout != torch.strided or given.is_nested):
            layout = "a nested tensor" if given.is_nested else given.layout
            raise TypeError(f"{name}: {argument} must be a dense tensor, got {layout}") from None


def _refuse_what_is_no_dense_tensor(op, arguments):
    """The same for an operator's arguments, which may also be missing, or written in place."""
    name = op._schema.name.partition("::")[2]
    for declared, given in zip(op._schema.arguments, arguments, strict=True):
        kind = str(declared.type)
        if "Tensor" not in kind or (given is None and kind.startswith("Optional")):
            continue
        if given is None:
            raise TypeError(f"{name}: {declared.name} must be a torch.Tensor, got NoneType") from None
        refuse_what_is_no_dense_tensor(name, {declared.name: given})
        if declared.alias_info is not None and given.is_neg():
            raise ValueError(
                f"{name}: {declared.name} is written in place and cannot be a negated view: use .resolve_neg()"
            ) from None


def _all_plain(arguments):
    """Whether every tensor is one that the implementation may see as it is: no subclass, on CPU or CUDA, and not a view
    whose negation is still to be done (the imaginary part of a conjugate).
    """
    for argument in arguments:
        if argument is None:
            continue
        kind = type(argument)
        if kind is _TENSOR or kind is _PARAMETER:
            if argument.is_neg() or not (argument.is_cuda or argument.is_cpu):
                return False
        elif isinstance(argument, _TENSOR):
            return False
    return True


def watched():
    """Whether something sees operators as they are dispatched: a compiler, a tracer, torch.func, a dispatch mode (fake
    tensors, selective checkpointing), a profiler.
    """
    return (
        is_compiling()
        or _dispatch_modes() != 0
        or _transforms_active()
        or _profiling()
        or _tracing_state() is not None
        or _key_included(_PRE_DISPATCH)  # make_fx(pre_dispatch=True): its mode is on a stack of its own
    )


def unwatched(tensors):
    """Whether a function may go past all operators and hand these tensors to kernels, if no gradient is recorded."""
    return not watched() and forward_ad._current_level < 0 and _all_plain(tensors)


def call_below_autograd(op, *arguments):
    """op(*arguments) without its Autograd kernel, for the forward of its autograd.Function.

    Plain CPU and CUDA tensors go straight to the implementation, unless somebody watches.
    """
    if is_compiling():
        return op(*arguments)
    try:
        if not watched() and _all_plain(arguments):
            return _IMPLEMENTATIONS[op](*arguments)
        with _below_autograd():
            return op(*arguments)
    except (AttributeError, RuntimeError):
        _refuse_what_is_no_dense_tensor(op, arguments)
        raise


def call_in_backward(op, *arguments):
    """op(*arguments) in the backward of an autograd.Function; its Autograd kernel matters only to create_graph=True."""
    if is_compiling() or torch.is_grad_enabled():
        return op(*arguments)
    if _key_included(_VMAP_MODE):  # is_grads_batched=True, jacobian(vectorize=True): tensors that hide a dimension
        with _below_autograd():
            return op(*arguments)
    return call_below_autograd(op, *arguments)


def refuse_second_derivatives(name):
    """For the backward of a node that keeps what its forward has computed: no graph leads from there to the node's
    inputs, so that create_graph=True would leave out terms without a word.
    """
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(_no_second_derivatives(name))


def _no_second_derivatives(name):
    return (
        f"{name} cannot be differentiated: second derivatives (create_graph=True) of mamba_ssm's "
        "operators are not implemented; the plain torch references (*_ref) have them"
    )


def wrote_in_place(tensor):
    """Bumps the version of a tensor that native code has written, so that autograd notices stale saved tensors."""
    if not tensor.is_inference():
        _increment_version(tensor)


def _autograd_kernel(name, op, function, differentiable):
    if function is None and differentiable:
        function = _no_second_derivative(name, op)

    def kernel(*arguments):
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    if not differentiable:
                        raise RuntimeError(
                            f"{name} writes in place and has no gradient, but an input requires one: call it under "
                            "torch.no_grad() or torch.inference_mode(), or detach the inputs"
                        )
                    if _transforms_active():
                        raise RuntimeError(
                            f"mamba_ssm::{name} does not work with torch.func transforms (grad, vjp, jacrev, ...): use "
                            "torch.autograd.grad or .backward(), or the plain torch reference (*_ref)"
                        )
                    _refuse_dual_tensors(name, arguments)
                    return function.apply(*arguments)
        _refuse_dual_tensors(name, arguments)
        with _below_autograd():
            return op(*arguments)

    return kernel


def _refuse_dual_tensors(name, arguments):
    """Forward-mode derivatives would be lost in silence: the kernels do not carry tangents."""
    if forward_ad._current_level < 0:
        return
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"mamba_ssm::{name} has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp): use "
                "reverse mode, or the plain torch reference (*_ref)"
            )


def _no_second_derivative(name, op):
    class NoSecondDerivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with _below_autograd():
                return op(*arguments)

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(_no_second_derivatives(f"mamba_ssm::{name}"))

    return NoSecondDerivative
