"""Packed sequences for the scans in plain torch, which take one sequence a row: cut apart, scan each, join."""

import itertools

import torch

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan.arguments import NAME, Inputs, States

_IN_TIME = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")


def scan_packed(scan, inputs, options):
    """scan(inputs, options) -> out, States, for inputs that may be packed. Out has V's dtype."""
    if inputs.cu_seqlens is not None:
        out, states = _scan_bounded(scan, inputs, options)
    elif inputs.seq_idx is not None:
        out, states = _scan_runs(scan, inputs, options)
    else:
        out, states = scan(inputs, options)
    return out.to(inputs.V.dtype), states


def _scan_bounded(scan, inputs, options):
    bounds = inputs.cu_seqlens.tolist()
    seqlen = inputs.V.shape[1]
    checks.check_bounds(NAME, bounds, seqlen)
    parts = [
        scan(_part(inputs, 0, begin, end, _row(inputs.states, row)), options)
        for row, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    empty, nothing = scan(_part(inputs, 0, 0, 0, None), options)
    behind = empty.new_zeros(1, seqlen - bounds[-1], *empty.shape[2:])
    out = torch.cat([*(out for out, _ in parts), behind], 1)
    return out, _rows([states for _, states in parts]) if parts else States(*(state[:0] for state in nothing))


def _scan_runs(scan, inputs, options):
    """seq_idx: a row's first run has its initial state, its last one gives the final state."""
    outs, finals = [], []
    for row, values in enumerate(inputs.seq_idx.tolist()):
        starts = [t for t in range(1, len(values)) if values[t] != values[t - 1]]
        parts, states = [], _row(inputs.states, row)
        for begin, end in zip([0, *starts], [*starts, len(values)], strict=True):
            out, final = scan(_part(inputs, row, begin, end, states), options)
            parts.append(out)
            states = None
        outs.append(_joined(parts, 1))
        finals.append(final)
    if not outs:
        return scan(inputs, options)
    return _joined(outs, 0), _rows(finals)


def _part(inputs, row, begin, end, states):
    """Steps begin to end of a row, as a batch of 1."""
    cut = [
        tensor[row : row + 1, begin:end] if name in _IN_TIME and tensor is not None else tensor
        for name, tensor in zip(Inputs._fields, inputs, strict=True)
    ]
    return Inputs(*cut[:-6], *(states or (None,) * 4), None, None)


def _row(states, row):
    return None if states is None else States(*(state[row : row + 1] for state in states))


def _rows(states):
    return States(*(_joined(parts, 0) for parts in zip(*states, strict=True)))


def _joined(parts, dim):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
