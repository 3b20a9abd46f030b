"""Mamba-2's scan on the CPU, as ratios to the plain-torch chunked scan."""

import dataclasses
import json
import sys
from functools import partial

import cases
import plain
import progress
import torch
from problems import ssd
from side import Side

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_chunk_scan_combined

OUR_REPEATS, REFERENCE_REPEATS = 10, 2
REFERENCE_CHUNKS = (64, 128)  # the faster one counts
VALIDATED_HEADS = 4  # on the CPU, where float64 is slow

_scan = partial(mamba_chunk_scan_combined, chunk_size=ssd.CHUNK, dt_softplus=True)


def times(case):
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}, seconds."""
    torch.set_num_threads(1)
    progress.show("comparing with float64")
    small = dataclasses.replace(case, heads=VALIDATED_HEADS)
    ssd.validate(Side(), _scan, small, ssd.inputs(small, "cpu"))
    references = {
        f"plain torch in chunks of {chunk}": partial(mamba_chunk_scan, chunk_size=chunk, dt_softplus=True)
        for chunk in REFERENCE_CHUNKS
    }
    inputs = ssd.inputs(case, "cpu")
    dout = torch.randn_like(inputs["x"])
    return plain.one_thread(_scan, references, inputs, dout, OUR_REPEATS, REFERENCE_REPEATS)


def measure(device):
    return plain.rows(cases.PLAIN_SSDS, __file__)


if __name__ == "__main__":
    print(json.dumps(times(cases.PLAIN_SSDS[int(sys.argv[1])])))
