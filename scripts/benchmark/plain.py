"""What the sections beside plain torch share: ratios of one run on the CPU, whose times alone mean little."""

import json
import os
import subprocess
import sys
import time

import progress
import torch
from problems.common import leaves_of
from timing import cpu_seconds

ISA_SWITCH = "MAMBA_SSM_CPU_ISA"


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


def one_thread(ours, references, inputs, dout, repeats, reference_repeats):
    """{forward and forward+backward, ours and the fastest reference's}, seconds; references: by what they are called.

    One thread, and the time that it had the CPU: what a busy machine does to torch's threads would flatter us.
    """
    leaves = leaves_of(inputs)
    wanted = list(leaves.values())

    def both_ways(name, function, repeats):
        def both():
            torch.autograd.grad(function(**leaves), wanted, dout)

        clock = time.process_time
        with torch.no_grad():
            forward_seconds = cpu_seconds(f"{name}forward", lambda: function(**inputs), repeats, clock=clock)
        return forward_seconds, cpu_seconds(f"{name}forward and backward", both, repeats, clock=clock)

    found = dict(zip(("fwd", "fwd+bwd"), both_ways("", ours, repeats), strict=True))
    others = [both_ways(f"{name}, ", function, reference_repeats) for name, function in references.items()]
    found["plain fwd"] = min(forward for forward, _ in others)
    found["plain fwd+bwd"] = min(both for _, both in others)
    return found


def rows(cases, script):
    """A table's rows of cases that a script of this folder measures by number, with each instruction set."""
    found = []
    for number, case in enumerate(cases):
        for isa in (None, "avx2"):
            kernels = isa or "best"
            times = in_own_process(f"{case.name}, {kernels} kernels", isa, script, str(number))
            found.append({"case": case.name, "kernels": kernels, "threads": 1, **compared(times), "load": load()})
    return found


def compared(times):
    """A table's columns of the times of ours and of plain torch, seconds by name."""
    return {
        "fwd x": times["plain fwd"] / times["fwd"],
        "fwd+bwd x": times["plain fwd+bwd"] / times["fwd+bwd"],
        **{f"{name} ms": times[name] * 1e3 for name in ("fwd", "fwd+bwd", "plain fwd", "plain fwd+bwd")},
    }


def load():
    """The machine's load average; above the number of threads: others disturbed what was just measured."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
