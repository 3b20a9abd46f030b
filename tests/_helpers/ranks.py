"""Processes that are the ranks of a process group, and what they share out."""

import datetime
import importlib
import json
import os
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from _helpers import programs


def same(*shape, seed=0):
    """The same random tensor on every rank, on the default device."""
    values = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return values.to(torch.empty(0).device)


def mine(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def spawn(world, folder, backend="gloo", device="cpu", names=None, checks="_helpers.distributed_checks"):
    """Runs the CHECKS of a module (those called names, or all), with a process for each rank: each rank's results."""
    given = world, str(folder), backend, device, names, checks
    mp.start_processes(run_checks, given, nprocs=world, start_method=programs.start_method())
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def run_checks(rank, world, folder, backend, device, names, checks):
    """In a process of its own: writes {check: None or what went wrong}."""
    checks = importlib.import_module(checks).CHECKS
    torch.set_num_threads(1)
    torch.set_default_device(device)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    results = {}
    for name in names or checks:
        try:
            checks[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        if not all(_everyone_has(results[name] is None)):
            results[name] = results[name] or "failed on another rank"
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(results, file)
    dist.barrier()  # so that gloo's threads hold no tensor while Python ends: that may abort the process
    dist.destroy_process_group()


def _everyone_has(fact):
    """Also keeps the ranks in step after a failure."""
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts
