"""Whether a model is still what it was: for those who repeat what it did without calling its modules."""

import torch

from mamba_ssm._torch.private import HOOKS_KNOWN, PARAMETERS_KNOWN, has_global_hooks

_KNOWN = "mamba_ssm.", "torch.nn."  # whose modules do the same again unless something that is compared has changed
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_DICTS = {*_HOOKS, "_parameters", "_buffers", "_modules"}  # others are about state dicts


class Snapshot:
    """What decides what a call of a model's submodules computes, but values of tensors and inputs: the modules, what
    they hold, hooks, and forward, __call__ and step of their classes. Not seen is code that was put in the place of
    other functions and methods in the midst of decoding, and what was changed inside a list or an object of no tensor.

    The model itself is not held: who deletes it gets its memory back when the snapshot is dropped.

    tensors: the submodules' parameters and buffers. usable: whether every submodule is one of this package or of
    torch.nn, without hooks or a forward of its own, and holds plain CPU tensors: others may do something else each
    time, or do what is not seen.
    """

    def __init__(self, model):
        self._modules = list(model.modules())[1:]
        self._children = dict(model.named_children())
        self._types = list(map(type, self._modules))
        self._classes = list(dict.fromkeys(self._types))
        self._functions = _functions_of(self._classes)
        self._contents = [_content_of(module) for module in self._modules]
        self.usable = HOOKS_KNOWN and PARAMETERS_KNOWN and all(map(_is_usable, self._modules))
        live = self._live_tensors() if self.usable else []
        self.tensors = [tensor for tensor in live if tensor is not None]
        self.usable = self.usable and are_plain(self.tensors)
        self._places = places_of(live) if self.usable else None

    def holds(self, model):
        """Whether the model is as it was. Some 0.2 ms for 200 modules."""
        if has_global_hooks() or dict(model.named_children()) != self._children:
            return False
        try:
            if [module.__dict__ for module in self._modules] != self._contents:
                return False
        except (RuntimeError, TypeError, ValueError):  # a tensor or array is another, and == gives no single answer
            return False
        return (
            list(map(type, self._modules)) == self._types
            and _functions_of(self._classes) == self._functions
            and places_of(self._live_tensors()) == self._places
        )

    def _live_tensors(self):
        """Parameters and buffers, None where a module has none."""
        found = []
        for module in self._modules:
            found += module._parameters.values()
            found += module._buffers.values()
        return found


def places_of(tensors):
    """Where tensors are and how they are laid out, so that native code given their addresses sees the same."""
    return [
        None
        if tensor is None
        else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous() or tensor.stride())
        for tensor in tensors
    ]


def are_plain(tensors):
    """Whether all are dense CPU tensors of no subclass."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
        for tensor in tensors
    )


def _content_of(module):
    """All that the module holds, with copies of the dicts that decide what it does."""
    content = dict(module.__dict__)
    for name, held in content.items():
        if isinstance(held, dict) and (name in _DICTS or not name.startswith("_")):
            content[name] = dict(held)
    return content


def _is_usable(module):
    return (
        type(module).__module__.startswith(_KNOWN)
        and not any(
            callable(held) and callable(getattr(type(module), name, None)) for name, held in module.__dict__.items()
        )
        and not any(getattr(module, hooks) for hooks in _HOOKS)
    )


def _functions_of(classes):
    return [(cls.forward, cls.__call__, getattr(cls, "step", None)) for cls in classes]
