"""A language model's decoding step on the CPU by one native call: what CUDA graphs are on a GPU.

A step is the same native calls for each token, and calling them from Python takes longer than a small layer computes.
So the second step with the same states is recorded from the embedding's output, or from the tokens of an int8
embedding, to the logits, and later ones repeat its calls on the same memory (mamba_ssm._native.sequences). A step is
repeated only where the model's modules would do the same again: nothing watches them, they are this package's and
torch's own without hooks, and neither they nor the memory of parameters and states has changed since
(mamba_ssm._torch.snapshots), which is looked at before each step, or once a call of decode where no code of others runs
between its steps. Another thread may not change the model meanwhile.
Values in that memory may change. Else, and where a step is more than native calls (attention, many rows), the modules
are called as ever.

Recordings belong to inference_params, one for each, and go with them or with the model, so that neither a copy nor a
pickle of a model ever holds one, and threads that decode with states of their own share nothing.
"""

import typing
import weakref
from functools import partial

import torch
import torch.nn as nn

from mamba_ssm._native.sequences import ALIGNMENT, Sequence, record
from mamba_ssm._torch import (
    Snapshot,
    are_plain,
    autocast_dtype,
    functions_watched,
    places_of,
    reference,
    watched,
    wrote_in_place,
)
from mamba_ssm.modules.quantized import QuantizedEmbedding
from mamba_ssm.ops.linear import project

_PAUSE = 16  # steps by modules before a model that has changed, or could not be recorded, is tried again

_SESSIONS: "dict[int, _Session]" = {}  # id of inference_params -> what is known of its steps


def recorded_step(model: typing.Any, input_ids: torch.Tensor, inference_params: typing.Any) -> torch.Tensor | None:
    """The logits (B, 1, vocabulary) of one token; None where the model's modules have to be called.

    model: a MambaLMHeadModel with a MixerModel as its backbone.
    """
    if watched() or torch.is_grad_enabled() or reference.on or functions_watched():
        return None
    if type(input_ids) is not torch.Tensor or input_ids.dim() != 2 or input_ids.shape[1] != 1:
        return None
    if not input_ids.is_cpu:
        _SESSIONS.pop(id(inference_params), None)  # it would keep the parameters that the model had on the CPU
        return None
    if not inference_params.seqlen_offset > 0 or autocast_dtype(input_ids) is not None:
        return None
    session = _SESSIONS.get(id(inference_params))
    if session is None or session.owner() is not inference_params or session.model() is not model:
        session = _begin(model, inference_params)
    return None if session is None else session.step(model, input_ids, inference_params)


def _begin(model: nn.Module, inference_params: typing.Any) -> "_Session | None":
    """A session that ends with its model or its inference_params."""
    key = id(inference_params)

    def forget(_: object, pop: typing.Any = _SESSIONS.pop) -> None:  # bound: the interpreter may be ending
        pop(key, None)

    try:
        session = _Session(weakref.ref(inference_params, forget), weakref.ref(model, forget))
    except TypeError:  # an object that is not told of when it goes
        return None
    _SESSIONS[key] = session
    return session


class _Session:
    """The steps of one model with one cache."""

    def __init__(self, owner: "weakref.ref[typing.Any]", model: "weakref.ref[nn.Module]") -> None:
        self.owner, self.model = owner, model
        self.snapshot: Snapshot | None = None
        self.states: typing.Any = None  # where they are, and how many threads compute
        self.sequence: Sequence | None = None
        self.tensors: list[torch.Tensor] = []  # the states
        self.known: list[torch.Tensor] = []  # and the model's own
        self.embeds = False  # whether the embedding's look-up is a native call too
        self.compared = False  # whether the model and the states were as ever at the last step
        self.pause = 0

    def step(self, model: typing.Any, input_ids: torch.Tensor, inference_params: typing.Any) -> torch.Tensor | None:
        if self.pause:
            self.pause -= 1
            return None
        if not (self.compared and getattr(inference_params, "undisturbed", False)):
            self.compared = self._compare(model, input_ids.shape[0], inference_params)
            if not self.compared:
                return None
        if self.embeds:
            aligned = input_ids.stride() == (1, 1) and input_ids.data_ptr() % ALIGNMENT == 0
            argument = input_ids if aligned else input_ids.clone(memory_format=torch.contiguous_format)
        else:
            argument = model.backbone._embed(input_ids)
        if self.sequence is None or not self.sequence.takes(argument):
            logits_of = partial(_logits_of, model, inference_params, self.embeds)
            logits, self.sequence = record(logits_of, argument, self.known)
            self.pause = _PAUSE if self.sequence is None else 0
            return logits
        logits = self.sequence.run(argument)
        for state in self.tensors:
            wrote_in_place(state)
        return logits

    def _compare(self, model: typing.Any, batch: int, inference_params: typing.Any) -> bool:
        """Whether the model and the states are as they were at the last step."""
        tensors = _tensors_in(inference_params.key_value_memory_dict)
        if tensors is None:
            self.pause = _PAUSE
            return False
        layers = list(inference_params.key_value_memory_dict)
        states = torch.get_num_threads(), batch, layers, places_of(tensors)
        if self.snapshot is None or not self.snapshot.holds(model):
            self.pause = 0 if self.snapshot is None else _PAUSE
            self.snapshot, self.states = Snapshot(model), None
        if states == self.states:
            return True
        self.states, self.sequence = states, None
        self.embeds = type(model.backbone.embedding) is QuantizedEmbedding
        if self.snapshot.usable and are_plain(tensors):
            self.tensors, self.known = tensors, [*self.snapshot.tensors, *tensors]
        else:
            self.tensors, self.known, self.pause = [], [], _PAUSE
        return False


def _tensors_in(cache: typing.Any) -> list[torch.Tensor] | None:
    """The states of all layers; None where they are not tuples of tensors."""
    found: list[torch.Tensor] = []
    for states in cache.values():
        if type(states) is not tuple:
            return None
        found += states
    return found if all(isinstance(state, torch.Tensor) for state in found) else None


def _logits_of(model: typing.Any, inference_params: typing.Any, embed: bool, given: torch.Tensor) -> torch.Tensor:
    """From tokens (B, 1), or what the embedding made of them."""
    hidden_states = model.backbone._embed(given) if embed else given
    hidden_states = model.backbone._mix(hidden_states, inference_params, {})
    model._check_head(hidden_states)
    logits: torch.Tensor = project(model.lm_head, hidden_states)
    return logits
