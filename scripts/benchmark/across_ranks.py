"""One sequence on one device, and over several by context parallel, in the same run.

torchrun --standalone --nproc-per-node 2 scripts/benchmark/across_ranks.py [--device cuda|cpu] [--json FILE]

A process has a GPU, or one thread of the CPU. Each layer is compared with float64 as in the section "block"; then what
all devices compute, outputs and gradients, with what one does. Both take turns. A time is that of the slowest process,
from idle devices on. What data parallel training does to the parameters' gradients, a sum over processes, is not part
of it.
"""

import argparse
import json
import os
import statistics
import sys
import time

import cases
import progress
import torch
import torch.distributed as dist
from problems import block
from problems.common import dtype_of, normals
from side import Side
from table import table

from mamba_ssm.distributed.context_parallel import context_parallel, split_sequence

REPEATS = 7


def main(arguments=None):
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as its first lines say")
    device = _device(parser, options.device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    try:
        progress.section("across-ranks")
        rows = [row for case in cases.ACROSS_RANKS[options.device] for row in measure(case, device)]
        if dist.get_rank() == 0:
            _tell(rows, options)
    finally:
        dist.destroy_process_group()


def _device(parser, kind):
    """This process's own."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return "cpu"
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank >= count:
        parser.error(f"--device cuda: a GPU for each process is needed, and torch finds {count}")
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def measure(case, device):
    """A row for each pass."""
    side, group = Side(), dist.group.WORLD
    layer = block.make_layer(case, device, side.function(block.LAYERS[case.layer][0]))
    x, dout = (normals(device, seed)(1, case.seqlen, case.d_model, dtype=dtype_of(case)) for seed in (0, 1))
    _show(f"{case.name}: comparing with float64")
    block.validate(side, layer, x)
    part, dout_part = (split_sequence(tensor, group).contiguous() for tensor in (x, dout))
    _check(side, layer, (x, dout), (part, dout_part))
    rows = []
    for which in case.passes:
        times = {"one": [], "all": []}
        for turn in range(REPEATS + 1):
            _show(f"{case.name}: {which} ({turn} of {REPEATS})" if turn else f"{case.name}: {which} (warm-up)")
            for name, given in (("one", (x, dout)), ("all", (part, dout_part))):
                context_parallel(layer, group if name == "all" else None)
                seconds = _seconds(name == "all" or dist.get_rank() == 0, _PASSES[which], layer, *given)
                if turn:
                    times[name].append(seconds)
        one, everyone = (statistics.median(seconds) * 1e3 for seconds in times.values())
        devices = {"devices": dist.get_world_size(), "one device ms": one, "all devices ms": everyone}
        rows.append({"case": case.name, "pass": which, **devices, "devices x": one / everyone})
    return rows


def _forward(layer, x, dout):
    with torch.no_grad():
        return layer(x)


def _forward_and_backward(layer, x, dout):
    """Output, gradient of x, gradients of the parameters."""
    x = x.detach().requires_grad_()
    out = layer(x)
    return out, *torch.autograd.grad(out, [x, *layer.parameters()], dout)


_PASSES = {"fwd": _forward, "fwd+bwd": _forward_and_backward}


def _check(side, layer, whole, part):
    """What all ranks compute is what one does: its output, its gradients."""
    expected = _forward_and_backward(layer, *whole)
    context_parallel(layer, dist.group.WORLD)
    found = _forward_and_backward(layer, *part)
    context_parallel(layer, None)
    for name, got, whole in zip(("out", "dx"), found, expected, strict=False):
        side.check_roughly(f"{name} over ranks", got, split_sequence(whole, dist.group.WORLD))
    for (name, _), got, whole in zip(layer.named_parameters(), found[2:], expected[2:], strict=True):
        total = got.float()
        dist.all_reduce(total)
        side.check_roughly(f"d{name} over ranks", total, whole)


def _seconds(busy, function, *arguments):
    """Of the slowest rank; busy: whether this one takes part."""
    _together(arguments[1])
    start = time.perf_counter()
    if busy:
        function(*arguments)
        if arguments[1].is_cuda:
            torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=arguments[1].device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _together(like):
    """No rank begins before all have come here, and their devices are idle."""
    dist.all_reduce(torch.zeros(1, device=like.device))
    if like.is_cuda:
        torch.cuda.synchronize()


def _show(step):
    if dist.get_rank() == 0:
        progress.show(step)


def _tell(rows, options):
    progress.clear()
    print(table(f"one sequence over {dist.get_world_size()} devices, torch {torch.__version__}", rows))
    if options.json:
        machine = {"device": options.device, "torch": torch.__version__}
        if options.device == "cuda":
            machine |= {"machine": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
