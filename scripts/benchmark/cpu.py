"""The CPU's section: the scan against the plain-torch reference, as ratios of one run.

Times of a shared machine mean little alone, so each instruction set is measured beside the reference, in a process of
its own.
"""

import dataclasses
import json
import os
import subprocess
import sys

import cases
import torch
from timing import cpu_seconds
from validate import check, scan_and_gradients

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

ISA_SWITCH = "MAMBA_SSM_CPU_ISA"
VALIDATED_CHANNELS = 72  # enough for full and partial vectors; float64 is slow on all of them
OUR_REPEATS = 20
REFERENCE_REPEATS = 2  # seconds each


def _validate(case):
    inputs = cases.scan_inputs(case, "cpu")
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = selective_scan_fn(**leaves, delta_softplus=True)
    dout = torch.randn_like(out)
    expected = scan_and_gradients(inputs, dout, -1, elements=1 << 22)
    check("out", out[-1], expected["out"], case.dtype)
    for name, gradient in zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True):
        check(f"d{name}", gradient.reshape(expected[name].shape), expected[name], case.dtype)


def measure():
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}."""
    torch.set_num_threads(cases.CPU_THREADS)
    _validate(dataclasses.replace(cases.CPU_SCAN, dim=VALIDATED_CHANNELS))
    inputs = cases.scan_inputs(cases.CPU_SCAN, "cpu")
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    wanted = list(leaves.values())
    dout = torch.randn_like(inputs["u"])

    def forward(function):
        with torch.no_grad():
            function(**inputs, delta_softplus=True)

    def both(function):
        torch.autograd.grad(function(**leaves, delta_softplus=True), wanted, dout)

    times = {
        "fwd": cpu_seconds(lambda: forward(selective_scan_fn), OUR_REPEATS),
        "fwd+bwd": cpu_seconds(lambda: both(selective_scan_fn), OUR_REPEATS),
    }
    # The reference starts its threads at each of thousands of small steps. On a busy machine two then wait for each
    # other and are many times slower than one, which would flatter us: the faster number of threads is what counts.
    references = []
    for threads in (cases.CPU_THREADS, 1):
        torch.set_num_threads(threads)
        references.append(
            (
                cpu_seconds(lambda: forward(selective_scan_ref), REFERENCE_REPEATS),
                cpu_seconds(lambda: both(selective_scan_ref), REFERENCE_REPEATS, warm_up=False),
            )
        )
    times["reference fwd"] = min(fwd for fwd, _ in references)
    times["reference fwd+bwd"] = min(both for _, both in references)
    return times


def in_own_process(isa, script, *arguments):
    """What a script of this folder prints as JSON, run with this instruction set (None: the best one)."""
    environment = dict(os.environ)
    environment.pop(ISA_SWITCH, None)
    if isa is not None:
        environment[ISA_SWITCH] = isa
    command = [sys.executable, os.path.abspath(script), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"the CPU benchmark with {ISA_SWITCH}={isa} failed:\n{run.stderr}")
    return json.loads(run.stdout)


def cpu(machine):
    rows = []
    for isa, label in ((None, "best instruction set"), ("avx2", "avx2")):
        times = in_own_process(isa, __file__)
        rows.append(
            {
                "case": f"scan {cases.CPU_SCAN.name}, {cases.CPU_THREADS} threads, {label}",
                "fwd x reference": times["reference fwd"] / times["fwd"],
                "fwd goal x": cases.CPU_FORWARD_GOAL,
                "fwd+bwd x reference": times["reference fwd+bwd"] / times["fwd+bwd"],
                "fwd+bwd goal x": cases.CPU_BOTH_GOAL,
                "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # above the threads: do not trust it
                **{f"{name} ms": seconds * 1e3 for name, seconds in times.items()},
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure()))
