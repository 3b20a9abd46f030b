"""Where in memory lies what a plan's steps make (plans.py)."""

import torch

from mamba_ssm._torch.plan_steps import Allocation, Function, Within, allocation

_ROOM = 512  # bytes: allocations begin at a multiple of this, as torch's on CUDA


def allocate_together(steps, device):
    """Makes parts of one allocation of those that only native calls use and no result needs. Allocating takes longer
    than most native functions do on the host.
    """
    ends = {number: end for end, step in enumerate(steps) for number in step.last}  # of lifetimes
    for step in steps:
        if type(step) is Function:
            for number in step.numbers:
                ends.pop(number, None)
    parts = []  # (position, number, first byte, behind the last)
    for position, step in enumerate(steps):
        if type(step) is Allocation and step.number in ends and step.bytes and step.device == device:
            parts.append((position, step.number, *_room(parts, position, ends, step.bytes)))
    if len(parts) < 2:
        return
    first, whole, *_ = parts[0]
    size = max(end for *_, end in parts)
    steps[first] = Allocation(whole, ((size,), (1,), torch.uint8, device))
    for position, number, begin, _ in parts[1:]:
        steps[position] = Within(number, whole, begin)
    last = max(ends[number] for _, number, *_ in parts)
    for step in steps:
        step.last = tuple(number for number in step.last if number != whole)
    steps[last].last += (whole,)


class Layout:
    """All of a call's memory, taken before its first step: results by themselves, one allocation for everything else.
    Then the steps are launches alone.
    """

    def __init__(self, steps, kept, device):
        ends = {number: end for end, step in enumerate(steps) for number in step.last}
        seen = {number for step in steps if type(step) is Function for number in step.numbers}
        self.makers = []  # of each new tensor: a function that allocates it, or where in the common one it begins
        self.views = []  # what functions of torch see of that one: (number, dtype, shape, strides, elements before it)
        parts = []
        for position, step in enumerate(steps):
            made = step if type(step) is Allocation else getattr(step, "made", None)
            if made is None:
                continue
            if made.number in kept or not made.bytes:
                self.makers.append(made.make)
                continue
            begin, end = _room(parts, position, ends, made.bytes)
            parts.append((position, made.number, begin, end))
            self.makers.append(begin)
            if made.number in seen:
                shape, strides, dtype, _ = made.layout
                self.views.append((made.number, dtype, shape, strides, begin // dtype.itemsize))
        whole = -(-max((end for *_, end in parts), default=0) // _ROOM) * _ROOM
        self.make_common = allocation((whole,), (1,), torch.uint8, device)

    def allocate(self, tensors, addresses):
        """Adds the new tensors, where these are results, and all their addresses; returns the common allocation."""
        common = self.make_common()
        start = common.data_ptr()
        for maker in self.makers:
            if maker.__class__ is int:
                tensors.append(None)
                addresses.append(start + maker)
            else:
                made = maker()
                tensors.append(made)
                addresses.append(made.data_ptr())
        return common

    def view(self, tensors, common):
        """Adds what else functions of torch see."""
        for number, dtype, shape, strides, before in self.views:
            tensors[number] = torch.as_strided(common.view(dtype), shape, strides, before)


def _room(parts, position, ends, size):
    """(begin, end) of so many bytes, the lowest that no part holds which is still needed at this position."""
    begin = 0
    for other, end in sorted((begin, end) for _, number, begin, end in parts if ends[number] >= position):
        if other - begin >= size:
            break
        begin = max(begin, -(-end // _ROOM) * _ROOM)
    return begin, begin + size


def give_back(steps, first, kept):
    """Says of each step which tensors, from the first number that was made on, no later one and no result needs."""
    seen = set(kept)
    for step in reversed(steps):
        step.last = tuple(number for number in step.numbers if number >= first and number not in seen)
        seen.update(step.last)
