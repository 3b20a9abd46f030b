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
import progress
import torch
from timing import cpu_seconds, load
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
    progress.show("comparing with float64")
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
    times["plain fwd"] = min(fwd for fwd, _ in references)
    times["plain fwd+bwd"] = min(both for _, both in references)
    return times


def in_own_process(name, isa, script, *arguments):
    """What a script of this folder prints as JSON, run with this instruction set (None: the best one).

    What it says on stderr is its progress, here shown with `name`, and its error should it fail.
    """
    environment = dict(os.environ)
    environment.pop(ISA_SWITCH, None)
    if isa is not None:
        environment[ISA_SWITCH] = isa
    command = [sys.executable, os.path.abspath(script), *arguments]
    said = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            said.append(line)
            progress.show(f"{name}: {line.strip()}")
        printed = process.stdout.read()
    if process.returncode != 0:
        raise RuntimeError(f"{name} with {ISA_SWITCH}={isa or 'unset'} failed:\n{''.join(said).rstrip()}")
    return json.loads(printed)


def compared(times):
    """A table's columns of the times of ours and of plain torch, seconds by name."""
    return {
        "fwd x": times["plain fwd"] / times["fwd"],
        "fwd+bwd x": times["plain fwd+bwd"] / times["fwd+bwd"],
        **{f"{name} ms": times[name] * 1e3 for name in ("fwd", "fwd+bwd", "plain fwd", "plain fwd+bwd")},
    }


def cpu(machine):
    rows = []
    for isa in (None, "avx2"):
        kernels = isa or "best"
        times = in_own_process(f"{cases.CPU_SCAN.name}, {kernels} kernels", isa, __file__)
        rows.append(
            {
                "case": cases.CPU_SCAN.name,
                "kernels": kernels,
                "threads": cases.CPU_THREADS,
                **compared(times),
                "load": load(),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure()))
