"""The scan on the CPU against the plain-torch reference, as ratios of one run.

Times of a shared machine mean little alone, so each instruction set is measured beside the reference, in a process of
its own.
"""

import dataclasses
import json
from functools import partial

import cases
import plain
import progress
import torch
from problems import scan
from problems.common import leaves_of
from side import Side
from timing import cpu_seconds

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

VALIDATED_CHANNELS = 72  # enough for full and partial vectors; float64 is slow on all of them
OUR_REPEATS = 20
REFERENCE_REPEATS = 2  # seconds each


def times():
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}."""
    torch.set_num_threads(cases.CPU_THREADS)
    progress.show("comparing with float64")
    small = dataclasses.replace(cases.PLAIN_SCAN, dim=VALIDATED_CHANNELS)
    scan.validate(Side(), partial(selective_scan_fn, delta_softplus=True), small, scan.inputs(small, "cpu"))
    inputs = scan.inputs(cases.PLAIN_SCAN, "cpu")
    leaves = leaves_of(inputs)
    wanted = list(leaves.values())
    dout = torch.randn_like(inputs["u"])

    def forward(function):
        with torch.no_grad():
            function(**inputs, delta_softplus=True)

    def both(function):
        torch.autograd.grad(function(**leaves, delta_softplus=True), wanted, dout)

    found = {
        "fwd": cpu_seconds("forward", lambda: forward(selective_scan_fn), OUR_REPEATS),
        "fwd+bwd": cpu_seconds("forward and backward", lambda: both(selective_scan_fn), OUR_REPEATS),
    }
    # The reference starts its threads at each of thousands of small steps. On a busy machine two then wait for each
    # other and are many times slower than one, which would flatter us: the faster number of threads is what counts.
    references = []
    for threads in (cases.CPU_THREADS, 1):
        torch.set_num_threads(threads)
        what = f"plain torch (threads: {threads}), forward"
        references.append(
            (
                cpu_seconds(what, lambda: forward(selective_scan_ref), REFERENCE_REPEATS),
                cpu_seconds(f"{what} and backward", lambda: both(selective_scan_ref), REFERENCE_REPEATS, warm_up=False),
            )
        )
    found["plain fwd"] = min(fwd for fwd, _ in references)
    found["plain fwd+bwd"] = min(both for _, both in references)
    return found


def measure(device):
    rows = []
    for isa in (None, "avx2"):
        kernels = isa or "best"
        found = plain.in_own_process(f"{cases.PLAIN_SCAN.name}, {kernels} kernels", isa, __file__)
        rows.append(
            {
                "case": cases.PLAIN_SCAN.name,
                "kernels": kernels,
                "threads": cases.CPU_THREADS,
                **plain.compared(found),
                "load": plain.load(),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(times()))
