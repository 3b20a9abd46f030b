"""Mamba-2's scan: on the GPU beside upstream's figures, on the CPU as ratios to the plain-torch chunked scan."""

import dataclasses
import json
import sys
import time

import cases
import progress
import torch
from timing import cpu_seconds, gpu_milliseconds, input_sets, load, tensor_bytes
from validate import check

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_chunk_scan_combined

WITH_BATCH = ("x", "dt", "B", "C")
OUR_REPEATS = 10
REFERENCE_REPEATS = 2
REFERENCE_CHUNKS = (64, 128)  # the faster one counts
VALIDATED_HEADS = 4  # on the CPU, where float64 is slow


def _scan(inputs):
    return mamba_chunk_scan_combined(**inputs, chunk_size=256, dt_softplus=True)


def _leaves(inputs):
    return {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}


def _validate(case, inputs):
    """Check out and every gradient of the call that is timed, on the last batch entry, against float64.

    Only that entry's output counts, so that the gradients summed over the batch are that entry's.
    """
    leaves = _leaves(inputs)
    out = _scan(leaves)
    dout = torch.zeros_like(out)
    dout[-1].normal_(generator=torch.Generator(dout.device).manual_seed(0))
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
    wide = {name: tensor[-1:] if name in WITH_BATCH else tensor for name, tensor in inputs.items()}
    wide = _leaves({name: tensor.double() for name, tensor in wide.items()})
    expected = mamba_chunk_scan(**wide, chunk_size=64, dt_softplus=True)
    references = torch.autograd.grad(expected, list(wide.values()), dout[-1:].double())
    check("out", out[-1:], expected, case.dtype)
    for (name, gradient), reference in zip(gradients.items(), references, strict=True):
        # Tensor cores take decayed products rounded to the dtype: its limit holds for the float32 sums too.
        check(f"d{name}", gradient[-1:] if name in WITH_BATCH else gradient, reference, case.dtype)


def _gpu():
    rows = []
    for case in cases.SSDS:
        progress.show(case.name)
        first = cases.ssd_inputs(case, "cuda")
        _validate(case, first)
        size = tensor_bytes([first[name] for name in WITH_BATCH])
        sets = input_sets(lambda seed, case=case: cases.ssd_inputs(case, "cuda", seed), size)
        with torch.no_grad():
            forward_ms = gpu_milliseconds(_scan, [(inputs,) for inputs in sets])
        graphs = []
        for inputs in sets:
            leaves = _leaves(inputs)
            out = _scan(leaves)
            graphs.append((out, list(leaves.values()), torch.randn_like(out)))
        backward_ms = gpu_milliseconds(
            lambda out, wanted, dout: torch.autograd.grad(out, wanted, dout, retain_graph=True), graphs
        )
        rows.append(
            {
                "case": case.name,
                "fwd ms": forward_ms,
                "bwd ms": backward_ms,
                "upstream fwd": case.upstream_forward,
                "upstream bwd": case.upstream_backward,
                "fwd x": case.upstream_forward / forward_ms,
                "bwd x": case.upstream_backward / backward_ms,
                "goal x": case.goal,
            }
        )
    return rows


def measure(case):
    """Validate and time in this process: {forward and forward+backward, ours and the reference's}, seconds.

    One thread, and the time that it had the CPU: what a busy machine does to torch's threads would flatter us.
    """
    torch.set_num_threads(1)
    progress.show("comparing with float64")
    small = dataclasses.replace(case, heads=VALIDATED_HEADS)
    _validate(small, cases.ssd_inputs(small, "cpu"))
    inputs = cases.ssd_inputs(case, "cpu")
    leaves = _leaves(inputs)
    wanted = list(leaves.values())
    dout = torch.randn_like(inputs["x"])

    def both_ways(name, function, repeats):
        def both():
            torch.autograd.grad(function(leaves), wanted, dout)

        with torch.no_grad():
            forward_seconds = cpu_seconds(f"{name}forward", lambda: function(inputs), repeats, clock=time.process_time)
        return forward_seconds, cpu_seconds(f"{name}forward and backward", both, repeats, clock=time.process_time)

    def reference(chunk):
        return lambda tensors: mamba_chunk_scan(**tensors, chunk_size=chunk, dt_softplus=True)

    times = dict(zip(("fwd", "fwd+bwd"), both_ways("", _scan, OUR_REPEATS), strict=True))
    references = [
        both_ways(f"plain torch in chunks of {chunk}, ", reference(chunk), REFERENCE_REPEATS)
        for chunk in REFERENCE_CHUNKS
    ]
    times["plain fwd"] = min(forward for forward, _ in references)
    times["plain fwd+bwd"] = min(both for _, both in references)
    return times


def _cpu():
    from cpu import compared, in_own_process

    rows = []
    for number, case in enumerate(cases.CPU_SSDS):
        for isa in (None, "avx2"):
            kernels = isa or "best"
            times = in_own_process(f"{case.name}, {kernels} kernels", isa, __file__, str(number))
            rows.append({"case": case.name, "kernels": kernels, "threads": 1, **compared(times), "load": load()})
    return rows


def ssd(machine):
    return _gpu() if machine["device"] == "cuda" else _cpu()


if __name__ == "__main__":
    print(json.dumps(measure(cases.CPU_SSDS[int(sys.argv[1])])))
