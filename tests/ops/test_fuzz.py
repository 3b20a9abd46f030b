"""Random mutations of every public operator's good arguments: a call works, or says in our words what is wrong.

The test runs fixed seeds in a process of its own, so that a crash is a failure like any other. By hand, for longer or
to see one call again:

    PYTHONPATH=tests python tests/ops/test_fuzz.py --seeds 0:20000
    PYTHONPATH=tests python tests/ops/test_fuzz.py --op causal_conv1d_fn --seeds 17
"""

import argparse
import faulthandler
import os
import random
import re
import sys
import time
import traceback
import warnings

import torch
from _helpers.programs import run_script
from _helpers.public_ops import PUBLIC_OPS

SEEDS, SECONDS = "0:400", 40  # of the test
OUR_ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)


def _strided(tensor, strides):
    room = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True) if size)
    return torch.zeros(room, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def _quantized(tensor):
    return torch.quantize_per_tensor(tensor.detach().float(), 0.1, 0, torch.qint8)


TENSOR_MUTATIONS = {
    # dtypes
    **{
        dtype: lambda tensor, dtype=dtype: tensor.detach().to(getattr(torch, dtype))
        for dtype in ("float16", "bfloat16", "float64", "complex64", "int64", "int32", "int8", "bool")
    },
    "quantized": _quantized,
    # shapes
    "first row": lambda tensor: tensor[0],
    "first two": lambda tensor: tensor[:2],
    "nothing of the first dimension": lambda tensor: tensor[:0],
    "nothing of the last dimension": lambda tensor: tensor[..., :0],
    "one less": lambda tensor: tensor[..., 1:],
    "twice as long": lambda tensor: torch.cat([tensor, tensor], -1),
    "a dimension in front": lambda tensor: tensor[None],
    "a dimension behind": lambda tensor: tensor[..., None],
    "0-d": lambda tensor: tensor.flatten()[0],
    "empty": lambda tensor: tensor.new_empty(0),
    # memory
    "transposed memory": lambda tensor: tensor.mT.contiguous().mT,
    "every other element": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "expanded": lambda tensor: tensor[..., :1].expand_as(tensor),
    "expanded rows": lambda tensor: tensor[:1].expand_as(tensor),
    "overlapping": lambda tensor: _strided(tensor, (1,) * tensor.dim()),
    "overlapping rows": lambda tensor: _strided(tensor, (1, *tensor.stride()[1:])),
    "an odd address": lambda tensor: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape),
    "negated view": lambda tensor: torch.complex(tensor, tensor).conj().imag,
    # kinds
    "meta": lambda tensor: tensor.detach().to("meta"),
    "sparse": lambda tensor: tensor.detach().to_sparse(),
    "sparse rows": lambda tensor: tensor.detach().to_sparse_csr(),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor.detach().unbind())),
    "nested, jagged": lambda tensor: torch.nested.nested_tensor(list(tensor.detach().unbind()), layout=torch.jagged),
    "parameter": lambda tensor: torch.nn.Parameter(tensor.detach()),
    "requires grad": lambda tensor: tensor.detach().clone().requires_grad_(),
    "list": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.detach().numpy(),
    # values
    "NaN": lambda tensor: torch.full_like(tensor, float("nan")),
    "infinite": lambda tensor: torch.full_like(tensor, float("inf")),
    "negative": lambda tensor: -tensor - 1,
    "huge": lambda tensor: tensor + 2**31 if tensor.dtype == torch.int64 else tensor.fill_(2**30),
    "huger": lambda tensor: tensor + 2**32 + 1,
    "least": lambda tensor: torch.full_like(tensor, torch.iinfo(tensor.dtype).min),
    "all the same": lambda tensor: torch.full_like(tensor, 1),
}
VALUES = [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**40, 2**63, -(2**63), 0.5, -2.5, float("nan"), float("inf"), "",
          "silu", "no", "cpu", b"x", [], [1], (1, 2, 3), {}, object, 1j, torch.int32, torch.float16]  # fmt: skip


def mutate(rng, value):
    """(what was done, the mutated value)."""
    if isinstance(value, torch.Tensor) and rng.random() < 0.85:
        name = rng.choice(list(TENSOR_MUTATIONS))
        try:
            return name, TENSOR_MUTATIONS[name](value)
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # this tensor has no such form
            return "as it was", value
    if not isinstance(value, (torch.Tensor, bool)) and rng.random() < 0.1:
        tensor = torch.tensor(value if isinstance(value, (int, float)) else 1)
        kind = rng.choice(["0-d tensor", "1-d tensor", "numpy"])
        return kind, {"0-d tensor": tensor, "1-d tensor": tensor[None].repeat(2), "numpy": tensor.numpy()}[kind]
    replacement = rng.choice(VALUES)
    return repr(replacement), replacement


def move(rng, arguments):
    """Most often one of the tensors, or all but one, to another device: (what was done, the arguments)."""
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    device = rng.choice(["meta", "cuda"] if torch.cuda.is_available() else ["meta"])
    moved = rng.sample(tensors, rng.choice([1, 1, max(len(tensors) - 1, 1), len(tensors)]))
    changes = {key: arguments[key].detach().to(device).requires_grad_(arguments[key].requires_grad) for key in moved}
    return f"to {device}: {' '.join(moved)}", {**arguments, **changes}


def run_call(name, seed):
    """Makes the call of this seed: ("worked" or "refused", what was changed), or (the fault, what was changed)."""
    op = PUBLIC_OPS[name]
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    arguments = op.arguments()
    if rng.random() < 0.3 and "update" not in name:
        arguments = {
            key: value.requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in arguments.items()
        }
        if "final_states_out" in arguments:
            arguments["final_states_out"] = arguments["final_states_out"].detach()
    changes, tensors = {}, [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    if rng.random() < 0.2:
        changes["tensors"], arguments = move(rng, arguments)
    for key in rng.sample(sorted(arguments), rng.choice([1, 1, 1, 2, 3]) if len(arguments) > 3 else 1):
        changes[key], arguments[key] = mutate(rng, arguments[key])
    changed = ", ".join(f"{key}: {change}" for key, change in changes.items())
    try:
        outputs = op.function(**arguments)
        outputs = [out for out in (outputs if isinstance(outputs, tuple) else [outputs]) if out is not None]
        wanted = [out for out in outputs if out.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(out) for out in wanted])
    except OUR_ERRORS as error:
        message = str(error)
        begins = re.match(rf"(mamba_ssm::)?({op.called})(_backward)?\b", message)
        names = re.search(rf"\b({'|'.join(arguments)}|dstate|headdim|an input|every tensor)\b", message)
        if begins and names:
            return "refused", changed
        return f"{type(error).__name__}: {message}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}", changed
    except Exception:  # not one of ours
        return traceback.format_exc(limit=-2), changed
    devices = {str(arguments[key].device) for key in tensors if isinstance(arguments[key], torch.Tensor)}
    return ("worked" if len(devices) < 2 else f"worked with tensors on {' and '.join(sorted(devices))}"), changed


def fuzz(names, seeds, seconds):
    """Prints each call before it is made and, if it went wrong, what was wrong; returns how many did."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = dict.fromkeys(("worked", "refused", "faults"), 0)
    begin = time.monotonic()
    for seed in seeds:
        if time.monotonic() - begin > seconds:
            print(f"stopped after {seconds} s, before seed {seed}", flush=True)
            break
        for name in names:
            print(f"{name!r} {seed}", flush=True)
            result, changed = run_call(name, seed)
            if result not in counts:
                print(f"FAULT --op {name!r} --seeds {seed}: {changed}\n{result}", flush=True)
                result = "faults"
            counts[result] += 1
    print(counts, flush=True)
    return counts["faults"]


def test_bad_arguments():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # as pytest has set it up
    done = run_script(__file__, "--seeds", SEEDS, "--seconds", SECONDS, environ=environ, timeout=10 * SECONDS)
    found = "FAULT" + done.stdout.partition("FAULT")[2] if "FAULT" in done.stdout else done.stdout[-200:]
    assert done.returncode == 0, f"seeds {SEEDS}: {found[:4000]}\n{done.stderr[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=SEEDS, help="one, or first:end")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--op", choices=PUBLIC_OPS, help="one operator instead of all")
    arguments = parser.parse_args()
    faulthandler.enable()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    sys.exit(min(fuzz([arguments.op] if arguments.op else list(PUBLIC_OPS), seeds, arguments.seconds), 1))


if __name__ == "__main__":
    main()
