"""Plans: what a call did, kept for later calls like it, which then skip checks, layout and filling records.

A small call is bound by the host's time. Most operators only look at their tensors, allocate, and call native functions
with a struct each, or torch for a product. So the second call of a kind is recorded: what it allocated, which functions
of torch it called, and which of a struct's pointers lie in which tensor. Later calls of that kind do the same with
their tensors, writing addresses into copies of the structs. A call that did more has no plan. What a call allocates is
given back after the last step that uses it; what only native functions see is one allocation, in which tensors that are
not needed at the same time share memory.

Calls are of one kind if all that an implementation can see is the same: options, the number of threads, what else the
operator says that it reads, and of each tensor the shape, strides, dtype, device and alignment. An implementation that
looks at values calls `look_at_values`. Plans hold no memory of tensors, and threads share them. They are not used while
something watches operators (see watching.py), so that compilers and tracers never meet one. Whoever changes what native
functions answer calls `forget`.
"""

import contextlib
import math
import operator
from functools import partial, reduce

import torch

from mamba_ssm._torch import graphs
from mamba_ssm._torch.plan_memory import Layout, allocate_together, give_back
from mamba_ssm._torch.plan_steps import Allocation, Call, Function, NoPlan, Tensors
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, below_autograd, current_stream, tensor_check
from mamba_ssm._torch.recording import Done, Recorder, run_recorded

_MOST = 256  # kinds of calls of one operator: the lengths of texts may all differ
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_NO_TENSORS = {type(None), bool, int, float}
_NEVER = -math.inf  # how often a kind came that has no plan
_PATIENCE = 64  # see Planned.patience
_ALIGNMENT = 16  # the most that kernels read at once
_MOST_RECENT = 4  # kinds that are tried first, see Recent
_LATE = 16  # how many calls of other kinds let one of them in
_FEWEST_COMPARED = 4  # tensors; of fewer a key is made as fast
_num_threads, _address = torch.get_num_threads, torch.Tensor.data_ptr
_is_nested = operator.attrgetter("is_nested")
_increment_version = torch.autograd.graph.increment_version

FORGOTTEN = [0]  # how often forget was called
_TABLES = []


class Planned:
    """An operator's implementation, by a plan where there is one."""

    def __init__(self, implementation, reads):
        self.implementation = implementation
        self.reads = reads  # functions of no arguments, whose results are what else the implementation depends on
        self.plans = {}  # kind of call -> its plan, or how often it came
        # A kind is recorded when it has come so often. Recording costs as much as a plan saves in some 50 calls, so
        # where there are more kinds than a table holds, it has to pay each time before the table is cleared.
        self.patience = 1
        self.recent = []
        self.late = 0  # calls of kinds that are not among these, until one gets in
        _TABLES.append(self)

    def __call__(self, arguments):
        """The results; None of calls that are not planned. Of a function, not of an operator, a result may be an
        argument or a part of one.
        """
        seen, types = [_num_threads(), *[read() for read in self.reads]], [*map(type, arguments)]
        for recent in self.recent:
            addresses = recent.addresses(seen, types, arguments)
            if addresses is not None:
                return self._run(recent.plan, arguments, addresses)
        key, addresses = [arguments[0].device, *seen], []
        for kind, argument in zip(types, arguments):  # noqa: B905  # a keyword takes as long as two turns
            if kind is _TENSOR or kind is _PARAMETER:
                address = argument.data_ptr()
                key += (
                    argument.shape,
                    argument.is_contiguous() or argument.stride(),
                    argument.dtype,
                    argument.get_device(),
                    address % _ALIGNMENT if address else None,  # None: of what has no memory, as on the meta device
                    argument.is_neg(),
                )
                addresses.append(address)
            elif kind in _NO_TENSORS or kind is tuple:  # of settings
                key.append(argument)
                addresses.append(None)
            else:
                return None
        key, plans = tuple(key), self.plans  # these plans: another thread may forget them, and then this call's too
        plan = plans.get(key, 0)
        if plan.__class__ is Plan:
            if plan.compared:
                self._remember(plan, plans, seen, types, arguments)
            return self._run(plan, arguments, addresses)
        if plan == 0 and not are_plain(arguments):
            return None
        if plan >= self.patience and (MODES_KEEP_INFERENCE or not torch.is_inference_mode_enabled()):
            results, plan = _record(self.implementation, arguments)
        else:
            results, plan = self.implementation(*arguments), plan + 1
        if len(plans) >= _MOST and key not in plans:
            plans.clear()
            self.patience = min(2 * self.patience, _PATIENCE)
        plans[key] = plan
        return results

    def _run(self, plan, arguments, addresses):
        for first, other, distance in plan.overlaps:
            if addresses[other] - addresses[first] != distance:
                return self.implementation(*arguments)
        return plan.run(arguments, addresses)

    def _remember(self, plan, plans, seen, types, arguments):
        """Of a kind that was not among the recent ones. Not each time: where there are many, that would be dear."""
        self.late -= 1
        if self.late >= 0:
            return
        self.late = _LATE
        recent = Recent(plan, seen, types, arguments)
        plan.compared = recent.check is not None and recent.addresses(seen, types, arguments) is not None
        if plan.compared:
            self.recent = [recent, *self.recent[: _MOST_RECENT - 1]]
            if plans is not self.plans:  # another thread has forgotten them
                self.recent = []


class Recent:
    """A kind of call for which torch says at once whether another call is of it: the guards of torch.compile compare
    all of a tensor that a plan depends on but its address, in less than half the time that making a key takes.
    """

    def __init__(self, plan, seen, types, arguments):
        self.plan, self.seen, self.types = plan, seen, types
        self.tensors = [number for number, kind in enumerate(types) if kind is _TENSOR or kind is _PARAMETER]
        self.others = [number for number in range(len(arguments)) if number not in self.tensors]
        self.settings = [arguments[number] for number in self.others]
        tensors = [arguments[number] for number in self.tensors]
        self.first, self.shape = self.tensors[0], tensors[0].shape  # what tells most kinds apart
        self.check = tensor_check(tensors)

    def addresses(self, seen, types, arguments):
        """One a tensor, None for others, of a call of this kind whose tensors are all aligned; else None.

        Also None of tensors given twice, and of those without elements.
        """
        if self.types != types or arguments[self.first].shape != self.shape or self.seen != seen:
            return None
        tensors = [arguments[number] for number in self.tensors]
        if self.settings != [arguments[number] for number in self.others]:
            return None
        if any(map(_is_nested, tensors)) or not self.check(*tensors):  # at a nested tensor the guards end the process
            return None
        found = [*map(_address, tensors)]
        if 0 in found or reduce(operator.or_, found) % _ALIGNMENT:
            return None
        addresses = [None] * len(arguments)
        for number, address in zip(self.tensors, found):  # noqa: B905  # as above
            addresses[number] = address
        return addresses


def are_plain(arguments):
    """Whether every tensor is one that an implementation may see as it is: no subclass, on CPU or CUDA, and not a view
    whose negation is still to be done (the imaginary part of a conjugate).
    """
    for argument in arguments:
        kind = type(argument)
        if kind is _TENSOR or kind is _PARAMETER:
            if argument.is_neg() or not (argument.is_cuda or argument.is_cpu):
                return False
        elif kind not in _NO_TENSORS and isinstance(argument, _TENSOR):
            return False
    return True


def forget():
    """Drops all plans, and those that calls are making now: for whoever has changed what the native functions of a
    process do. Sequences compare FORGOTTEN.
    """
    FORGOTTEN[0] += 1
    for planned in _TABLES:
        planned.plans, planned.patience = {}, 1
        planned.recent, planned.late = [], 0


def _record(implementation, arguments):
    """(The implementation's results, the plan or _NEVER)."""
    recorder = Recorder()
    with contextlib.nullcontext() if below_autograd is None else below_autograd():  # where linear is one function
        results = run_recorded(recorder, implementation, arguments)
    if not recorder.plain or all(type(step) is Done for step in recorder.steps):
        return results, _NEVER
    try:
        return results, Plan(recorder.steps, arguments, results, recorder.written)
    except NoPlan:
        return results, _NEVER


def forgotten():
    """How often plans were dropped: what was recorded before the last time is to be dropped too."""
    return FORGOTTEN[0]


# ---- a plan ----------------------------------------------------------------------------------------------------------


class Plan:
    """What calls of one kind do, with numbered tensors: the arguments, then those that a call makes, in order."""

    def __init__(self, steps, arguments, results, written):
        found = Tensors(arguments)
        steps = [found.step_of(step) for step in steps]
        device = arguments[0].device
        self.index = arguments[0].get_device()
        self.results_of = found.results_of(results)
        self.written = [found.argument_of(tensor) for tensor in written if not found.has_made(tensor)]
        # (an argument, another that holds some of the same memory, which the plan counts as the first's, bytes from
        # start to start): the plan is for calls with the same
        self.overlaps = found.overlaps
        self.idle = []  # structs that no call is using: threads share plans
        self.compared = sum(isinstance(given, _TENSOR) for given in arguments) >= _FEWEST_COMPARED  # see Recent
        kept = set(found.kept)
        give_back(steps, len(arguments), kept)
        self.calls = [step for step in steps if type(step) is Call]
        self.layout = self.graphs = None
        if graphs.wanted(steps, arguments):
            self.layout = Layout(steps, kept, device)
            self.written += {step.wrote for step in steps if type(step) is Function} & set(range(len(arguments)))
            self.graphs = graphs.Graphs(self.calls[0], device)
            steps = [step.into() for step in steps if type(step) is not Allocation]
            for step in steps:
                step.last = ()
        else:
            allocate_together(steps, device)
        self.steps = steps

    def run(self, arguments, addresses):
        tensors = list(arguments)
        stream = None if self.index < 0 else current_stream(self.index)
        if self.layout is None:
            self._run_steps(tensors, addresses, stream)
        else:
            common = self.layout.allocate(tensors, addresses)
            key = self.graphs.launch(addresses, stream)
            if key is not None:
                self.layout.view(tensors, common)
                self.graphs.launch_steps(key, partial(self._run_steps, tensors, addresses))
        for number in self.written:
            if not arguments[number].is_inference():
                _increment_version(arguments[number])
        return self.results_of(tensors)

    def _run_steps(self, tensors, addresses, stream):
        try:
            structs = self.idle.pop()
        except IndexError:
            structs = [call.struct() for call in self.calls]
        pending = iter(structs)
        for step in self.steps:
            step.run(tensors, addresses, pending, stream)
            for number in step.last:
                tensors[number] = None
        self.idle.append(structs)
