"""What a block's submodules are to its fused operators: holders of parameters, as long as they are nothing more."""

import sys
import typing

import torch
import torch.nn as nn

from mamba_ssm._torch.autocast import traced_by_old_torch
from mamba_ssm._torch.private import HOOKS_KNOWN as _HOOKS_KNOWN
from mamba_ssm._torch.private import PARAMETERS_KNOWN as _PARAMETERS_KNOWN
from mamba_ssm._torch.private import has_global_hooks as _has_global_hooks
from mamba_ssm._torch.private import is_compiling

_Module = typing.TypeVar("_Module", bound=nn.Module)
_CALL = nn.Module.__call__


def is_plain(module: nn.Module, cls: type[_Module]) -> typing.TypeGuard[_Module]:
    """Whether module computes what cls computes from its weight and bias, so that an operator may take these instead.

    It does not if it is another module in cls' place (LoRA and other adapters, quantised layers, FSDP), has hooks
    (pruning, weight_norm, captured activations) or a forward of its own (offloading), or if its weight is a tensor with
    its own arithmetic (DTensor, torchao). Such a module has to be called.
    """
    # no bool() of a dict, which torch 2.2's compiler does not follow
    if type(module).forward is not cls.forward or not _HOOKS_KNOWN or module._forward_hooks:
        return False
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if traced_by_old_torch():  # which cannot look further
        return True
    # not module.weight, which a parametrization would compute
    weight = module._parameters.get("weight") if _PARAMETERS_KNOWN else getattr(module, "weight", None)
    own_arithmetic = type(weight) is not nn.Parameter and hasattr(weight, "__tensor_flatten__")
    return "forward" not in module.__dict__ and not own_arithmetic


def is_bare(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether nobody would see a call of module but cls.forward itself: whether its caller may do that one's work. A
    module of its own __call__, or after its compile(), is not.
    """
    called_as_ever = type(module).__call__ is _CALL and getattr(module, "_compiled_call_impl", None) is None
    return called_as_ever and is_plain(module, cls) and not _has_global_hooks()


def parameters_of(module: nn.Module, name: str) -> dict[str, nn.Parameter | None]:
    """The own parameters, by name, of module's submodule of this name, past nn.Module's look-up of attributes. None
    where torch does not say, and under a compiler: torch 2.4's fails at these dicts, and fake tensors refuse mixed
    devices anyway.
    """
    if not _PARAMETERS_KNOWN or is_compiling():
        return {}
    submodule = module._modules.get(name)
    parameters = {} if submodule is None else submodule._parameters
    return parameters if isinstance(parameters, dict) else {}  # not one, of a scripted module


def weight_and_bias(module: typing.Any) -> tuple[typing.Any, typing.Any]:
    """module.weight and module.bias, past nn.Module's look-up of attributes, which is a Python function."""
    parameters = {} if not _PARAMETERS_KNOWN or traced_by_old_torch() else module._parameters
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return module.weight, module.bias  # not parameters: of replicas, and those that another module holds flattened


_TRANSFORMERS = "transformers.", "transformers_modules."
_CALLERS = 8  # how far up module_behind looks: transformers puts functions of its own between a layer and an operator


def _weight_of(module: nn.Module) -> object:
    parameters = module._parameters if _PARAMETERS_KNOWN else {}
    found = parameters.get("weight") if isinstance(parameters, dict) else None  # not one, of a scripted module
    if found is None and not hasattr(module, "parametrizations"):  # which compute one anew, never the one given
        found = getattr(module, "weight", None)
    return found


def _is_parallel(module: nn.Module) -> bool:
    """Whether it is a linear layer, upstream's or ours, that also reduces over ranks: who hands its weight over, as
    upstream's Mamba2 does, reduces too.
    """
    return isinstance(module, nn.Linear) and hasattr(module, "process_group")


def _is_of_transformers(layer: nn.Module) -> bool:
    """Whether transformers, or code that it has loaded from a hub, defines the layer's class or a base of it."""
    return any(cls.__module__.startswith(_TRANSFORMERS) for cls in type(layer).__mro__)


def module_behind(
    projection: torch.Tensor | nn.Module | None,
) -> typing.Callable[[torch.Tensor], torch.Tensor] | None:
    """The module to call instead of multiplying by this weight, or None where the weight is all of it.

    For public functions that take the weights of projections. They also take the module in a weight's place, which is
    then the one to call. transformers knows nothing of this and hands weights over, even where a LoRA adapter or a
    quantised layer stands around them, or hooks compute them (pruning, DeepSpeed), whose results and gradients would be
    lost without a word. A weight does not know its module, but the layer that made the call does: it is a `self` up the
    stack. The search takes some 5 us a weight, is made only in a process that has transformers loaded, and heeds only
    its layers. A compiler cannot follow it; there the weight counts.
    """
    if isinstance(projection, nn.Module):
        return projection
    if "transformers" not in sys.modules or not isinstance(projection, torch.Tensor) or is_compiling():
        return None
    frame = sys._getframe(2)
    for _ in range(_CALLERS):
        code = frame.f_code
        # asking all for f_locals takes twice as long; free: in a closure, which checkpoint calls without the layer
        if (code.co_argcount and code.co_varnames[0] == "self") or "self" in code.co_freevars:
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module) and _is_of_transformers(layer):
                for module in layer.children():
                    if _weight_of(module) is projection:
                        return None if is_plain(module, nn.Linear) or _is_parallel(module) else module
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
