"""Mamba-3's scan on the CPU, as ratios to the same by chunks in plain torch."""

import dataclasses
import json
import sys
from functools import partial

import cases
import plain
import progress
import torch
from problems import mamba3_scan as problem
from side import Side

from mamba_ssm.ops.mamba3_scan import mamba3_scan, mamba3_scan_ref

OUR_REPEATS, REFERENCE_REPEATS = 10, 2
VALIDATED_HEADS = 2  # on the CPU, where float64 is slow


def times(case):
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}, seconds."""
    torch.set_num_threads(1)
    progress.show("comparing with float64")
    small = dataclasses.replace(case, heads=VALIDATED_HEADS)
    ours, plain_torch = (problem.call(function, small) for function in (mamba3_scan, mamba3_scan_ref))
    problem.validate(Side(), ours, small, problem.inputs(small, "cpu", length=(case.seqlen,)))
    inputs = problem.inputs(case, "cpu", length=(case.seqlen,))
    dout = torch.randn_like(inputs["V"])
    references = {"plain torch in chunks": partial(plain_torch, chunked=True)}
    return plain.one_thread(ours, references, inputs, dout, OUR_REPEATS, REFERENCE_REPEATS)


def measure(device):
    return plain.rows(cases.PLAIN_MAMBA3S, __file__)


if __name__ == "__main__":
    print(json.dumps(times(cases.PLAIN_MAMBA3S[int(sys.argv[1])])))
