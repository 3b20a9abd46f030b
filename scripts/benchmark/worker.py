"""One side in a process of its own: JSON commands come in on stdin, each is answered by one JSON line.

Started by sides.py as: python worker.py DEVICE KERNELS [FOLDER ...], with the peer's folders first on the import path.
KERNELS are those that calls are to pass over, "" for none.
"""

import gc
import importlib
import json
import os
import sys
import traceback

import cases
import timing
import torch
from side import Lacking, Side
from validate import Mismatch


class Worker:
    def __init__(self, device, folders):
        self.device = device
        self.side = Side(folders)
        self.calls, self.watches = {}, {}

    def hello(self):
        facts = {"torch": torch.__version__, "packages": self.side.packages()}
        if self.device == "cuda":
            facts.update(machine=torch.cuda.get_device_name(), cuda=torch.version.cuda)
        return facts

    def ceilings(self):
        return timing.ceilings()

    def prepare(self, kind, fields):
        """Make a case's inputs, compare its results with the reference, and keep its calls."""
        self.calls, self.watches = {}, {}
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # which the other side may need
        module, name = kind
        case = getattr(importlib.import_module(module), name)(**fields)
        torch.manual_seed(0)
        self.calls = importlib.import_module(f"problems.{case.problem}").prepare(case, self.device, self.side)
        return {}

    def kernels(self, which):
        """The CUDA kernels of this package that one call of a pass launches, none where the side has no table."""
        try:
            from mamba_ssm.utils.kernels import launched
        except ImportError:  # another package, or an older one
            return {"kernels": []}
        with launched() as found:
            self.calls[which][0]()
        return {"kernels": sorted({launch.kernel.id for launch in found})}

    def measure(self, which, mode, repeats):
        """The seconds of some calls of a pass; what the first time prepares is kept for the next ones."""
        if mode == "memory":
            return self.calls[which]()
        if (which, mode) not in self.watches:
            self.watches = {(which, mode): timing.Stopwatch(self.calls[which], mode, self.device)}
        seconds, dry = self.watches[which, mode].times(repeats)
        return {"seconds": seconds, "dry": dry}


def main(device, without, *folders):
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a package prints is no answer
    if device == "cpu":
        torch.set_num_threads(min(cases.CPU_THREADS, torch.get_num_threads()))
    worker = Worker(device, folders)
    if without:
        from mamba_ssm.utils import kernels

        kernels.without(*without.split(",")).__enter__()  # until the process ends
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(worker, command.pop("command"))(**command)
        except Lacking as error:
            reply = {"failed": f"lacks it: {error}"}
        except Mismatch as error:
            reply = {"failed": f"is wrong: {error}"}
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
