"""Mamba-2's scan on the CPU, as ratios to the plain-torch chunked scan."""

import dataclasses
import json
import sys
import time
from functools import partial

import cases
import plain
import progress
import torch
from problems import ssd
from problems.common import leaves_of
from side import Side
from timing import cpu_seconds

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_chunk_scan_combined

OUR_REPEATS = 10
REFERENCE_REPEATS = 2
REFERENCE_CHUNKS = (64, 128)  # the faster one counts
VALIDATED_HEADS = 4  # on the CPU, where float64 is slow

_scan = partial(mamba_chunk_scan_combined, chunk_size=ssd.CHUNK, dt_softplus=True)


def times(case):
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}, seconds.

    One thread, and the time that it had the CPU: what a busy machine does to torch's threads would flatter us.
    """
    torch.set_num_threads(1)
    progress.show("comparing with float64")
    small = dataclasses.replace(case, heads=VALIDATED_HEADS)
    ssd.validate(Side(), _scan, small, ssd.inputs(small, "cpu"))
    inputs = ssd.inputs(case, "cpu")
    leaves = leaves_of(inputs)
    wanted = list(leaves.values())
    dout = torch.randn_like(inputs["x"])

    def both_ways(name, function, repeats):
        def both():
            torch.autograd.grad(function(**leaves), wanted, dout)

        clock = time.process_time
        with torch.no_grad():
            forward_seconds = cpu_seconds(f"{name}forward", lambda: function(**inputs), repeats, clock=clock)
        return forward_seconds, cpu_seconds(f"{name}forward and backward", both, repeats, clock=clock)

    def reference(chunk):
        return partial(mamba_chunk_scan, chunk_size=chunk, dt_softplus=True)

    found = dict(zip(("fwd", "fwd+bwd"), both_ways("", _scan, OUR_REPEATS), strict=True))
    references = [
        both_ways(f"plain torch in chunks of {chunk}, ", reference(chunk), REFERENCE_REPEATS)
        for chunk in REFERENCE_CHUNKS
    ]
    found["plain fwd"] = min(forward for forward, _ in references)
    found["plain fwd+bwd"] = min(both for _, both in references)
    return found


def measure(device):
    rows = []
    for number, case in enumerate(cases.PLAIN_SSDS):
        for isa in (None, "avx2"):
            kernels = isa or "best"
            found = plain.in_own_process(f"{case.name}, {kernels} kernels", isa, __file__, str(number))
            compared = plain.compared(found)
            rows.append({"case": case.name, "kernels": kernels, "threads": 1, **compared, "load": plain.load()})
    return rows


if __name__ == "__main__":
    print(json.dumps(times(cases.PLAIN_SSDS[int(sys.argv[1])])))
