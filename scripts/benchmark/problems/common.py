"""What the problems share: inputs, the calls of each pass, and the check of a function's gradients."""

from functools import partial

import torch

L2_BYTES = 200e6  # together the input sets are several times the L2 of any GPU of today
MOST_SETS = 16


def dtype_of(case):
    return getattr(torch, case.dtype)


def normals(device, seed):
    """normal(*shape, dtype=, scale=): random tensors, the same on both sides."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

    return normal


def tensor_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def input_sets(make, device):
    """make(0), make(1), ...: so many dicts of tensors that a set has left the L2 when its turn comes again."""
    first = make(0)
    count = int(L2_BYTES / tensor_bytes(first.values())) + 1 if device == "cuda" else 1
    return [first, *(make(seed) for seed in range(1, min(MOST_SETS, count)))]


def leaves_of(inputs):
    return {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}


def as_tuple(outputs):
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def differentiable_calls(function, sets, passes, parameters=()):
    """{pass: a call for each set} of function(**tensors); gradients by all tensors and the parameters are taken."""
    sets = [leaves_of(inputs) for inputs in sets]
    return {
        which: [_CALLS[which](function, leaves, parameters) for leaves in sets] for which in passes if which in _CALLS
    }


def _without_gradients(function, leaves, parameters):
    return torch.no_grad()(partial(function, **leaves))


def _forward(function, leaves, parameters):
    return partial(function, **leaves)


def _backward(function, leaves, parameters):
    outputs, wanted = as_tuple(function(**leaves)), [*leaves.values(), *parameters]
    gradients = [torch.randn_like(output) for output in outputs]
    return partial(torch.autograd.grad, outputs, wanted, gradients, retain_graph=True)


def _both(function, leaves, parameters):
    wanted = [*leaves.values(), *parameters]
    gradients = [torch.randn_like(output) for output in as_tuple(function(**leaves))]

    def call():
        return torch.autograd.grad(as_tuple(function(**leaves)), wanted, gradients)

    return call


_CALLS = {"no grad": _without_gradients, "fwd": _forward, "bwd": _backward, "fwd+bwd": _both}


def check_with_gradients(side, function, reference, inputs, with_rows, rows, dtype=None, roughly=False, factors=None):
    """Outputs and gradients of the call that is timed, where only its last rows' outputs count.

    The tensors named in with_rows, and the outputs, have rows as their first dimension; the gradients of the others
    are sums over rows, so that they are those rows'. dtype: the one whose rounding gradients may have, None for their
    own. roughly: the call goes through layers in a low precision. factors: of Side.check, by name, where not 1.
    """
    leaves = leaves_of(inputs)
    outputs = as_tuple(function(**leaves))
    gradients = [torch.zeros_like(output) for output in outputs]
    for gradient in gradients:
        gradient[-rows:] = torch.randn_like(gradient[-rows:])
    found = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    wide = {name: tensor[-rows:] if name in with_rows else tensor for name, tensor in inputs.items()}
    wide = leaves_of({name: tensor.double() for name, tensor in wide.items()})
    expected = as_tuple(reference(**wide))
    references = torch.autograd.grad(expected, list(wide.values()), [g[-rows:].double() for g in gradients])

    def check(name, got, exact, dtype):
        if roughly:
            side.check_roughly(name, got, exact)
        else:
            side.check(name, got, exact, dtype, (factors or {}).get(name, 1.0))

    for i, output in enumerate(outputs):
        check(f"output {i}", output[-rows:], expected[i], output.dtype)
    for name, gradient, exact in zip(leaves, found, references, strict=True):
        got = gradient[-rows:] if name in with_rows else gradient
        check(f"d{name}", got, exact, dtype or gradient.dtype)
