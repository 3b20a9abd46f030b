"""What the sections beside plain torch share: ratios of one run on the CPU, whose times alone mean little."""

import json
import os
import subprocess
import sys

import progress

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
