"""A training step of a language model: float32 parameters, bfloat16 autocast, cross entropy, AdamW.

The loss is the model's own where it takes labels, and the cross entropy of its logits where it does not, as upstream's.
"""

import copy
import gc
import inspect
from functools import partial

import references
import torch
import torch.nn.functional as F

from problems.language_model import WARM_UP, captured, make, random_tokens
from problems.memory import memory_of_training

VALIDATED_ROWS, VALIDATED_STEPS = 1, 32
GRADIENT_LIMIT = 0.1  # of all gradients together: bfloat16 in every layer, forward and backward
LEARNING_RATE = 3e-4
COMPARED = 3  # steps of a compiled or captured model beside those of the eager one
COMPILED = {"compiled": "default", "reduce-overhead": "reduce-overhead"}  # torch.compile's mode
LOSS_LIMIT, DECREASE_LIMIT = 0.01, 0.1  # the compiler rounds elsewhere; the decrease shows that the steps were taken


def _own_loss(model, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return model(tokens, labels=tokens).loss


def _loss_of_logits(model, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _loss_of(model):
    return _own_loss if "labels" in inspect.signature(model.forward).parameters else _loss_of_logits


def _validate(side, loss, model, tokens):
    wide = copy.deepcopy(model).double()
    logits = references.language_model(wide, tokens)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    found = loss(model, tokens)
    side.check_roughly("loss", found, expected)
    found = torch.autograd.grad(found, list(model.parameters()))
    exact = torch.autograd.grad(expected, list(wide.parameters()))
    found, exact = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (found, exact))
    side.check_roughly("gradients", found, exact, GRADIENT_LIMIT)


def _compiled(loss, mode):
    compiled = torch.compile(loss, mode=mode)

    def of_step(*arguments):
        torch.compiler.cudagraph_mark_step_begin()  # the last step's loss may be written over
        return compiled(*arguments)

    return of_step


def _update(model, mode, device):
    """backward(loss): the gradients, the optimizer's step, and no gradients any more."""
    options = {"fused": True} if device == "cuda" else {}
    if mode == "captured":
        options["capturable"] = True  # its count of steps is on the GPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **options)

    def backward(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return backward


def _step(loss, backward):
    def step():
        value = loss()
        backward(value)
        return value.detach()

    return step


def _losses(step, count):
    return torch.stack([step().clone() for _ in range(count)])


def _compare_with_eager(side, found, expected):
    side.check_roughly("losses of steps", found, expected, LOSS_LIMIT)
    side.check_roughly("what steps change of the loss", found - found[0], expected - expected[0], DECREASE_LIMIT)


def prepare(case, device, side):
    model = make(case, device, side, torch.float32)
    tokens = random_tokens(case, device, case.seqlen)
    loss = _loss_of(model)
    if case.mode == "eager":
        _validate(side, loss, model, tokens[:VALIDATED_ROWS, :VALIDATED_STEPS])
    else:
        warm_up = WARM_UP if case.mode == "captured" else 0
        eager = copy.deepcopy(model)
        step = _step(partial(loss, eager, tokens), _update(eager, "eager", device))
        expected = _losses(step, warm_up + COMPARED)[warm_up:]
        del eager, step
        gc.collect()  # what is freed later would be missing in a step's memory
    if case.mode in COMPILED:
        torch.compiler.reset()  # another case's model, and what was compiled for it
        loss = _compiled(loss, COMPILED[case.mode])
    forward, backward = partial(loss, model, tokens), _update(model, case.mode, device)
    step = _step(forward, backward)
    if case.mode == "captured":
        step = captured(step)
    if case.mode == "eager":
        step()  # the optimizer's states are allocated by its first step, and are no part of a step's memory
    else:
        _compare_with_eager(side, _losses(step, COMPARED), expected)
    if case.mode == "captured":
        memory = partial(dict, kept=None, peak=step.pool_bytes * 1e-6)
    else:
        memory = partial(memory_of_training, forward, backward)
    return {"step": [step], "memory": memory}
