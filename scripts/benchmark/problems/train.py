"""A training step of a language model: float32 parameters, bfloat16 autocast, cross entropy, AdamW."""

import copy
from functools import partial

import references
import torch
import torch.nn.functional as F

from problems.language_model import make, random_tokens
from problems.memory import memory_of_training

VALIDATED_ROWS, VALIDATED_STEPS = 1, 32
GRADIENT_LIMIT = 0.1  # of all gradients together: bfloat16 in every layer, forward and backward


def _loss(model, tokens):
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _validate(side, model, tokens):
    wide = copy.deepcopy(model).double()
    logits = references.language_model(wide, tokens)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = _loss(model, tokens)
    side.check_roughly("loss", loss, expected)
    found = torch.autograd.grad(loss, list(model.parameters()))
    exact = torch.autograd.grad(expected, list(wide.parameters()))
    found, exact = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (found, exact))
    side.check_roughly("gradients", found, exact, GRADIENT_LIMIT)


def prepare(case, device, side):
    model = make(case, device, side, torch.float32)
    tokens = random_tokens(case, device, case.seqlen)
    _validate(side, model, tokens[:VALIDATED_ROWS, :VALIDATED_STEPS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def backward(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step():
        backward(_loss(model, tokens))

    step()  # the optimizer's states are allocated by its first step, and are no part of a step's memory
    return {"step": [step], "memory": partial(memory_of_training, partial(_loss, model, tokens), backward)}
