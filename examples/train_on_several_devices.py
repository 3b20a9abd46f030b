"""Trains a small Mamba-2 language model on several GPUs, or CPU processes: DDP or FSDP2, and one sequence in parts.

    torchrun --standalone --nproc-per-node 4 examples/train_on_several_devices.py [--context 2] [--fsdp] [--checkpoint]

With --context N, N neighbouring processes share each sequence: each holds one part of it. The other processes have
other sequences. The model learns to repeat a sequence's first token at every step. A later part never sees that token:
it knows it only from the state that the part before it passes on. Half a minute of processor time with 4 processes.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.distributed.context_parallel import context_parallel, split_sequence
from mamba_ssm.models.config_mamba import MambaConfig

FIRST, NOISE = 8, 8  # kinds of first tokens, and of those that follow
BATCH, LENGTH = 16, 32


def make_model(options, mesh, device):
    ssm_cfg = {"layer": "Mamba2", "d_state": 16, "headdim": 16, "chunk_size": 64}
    config = MambaConfig(d_model=32, n_layer=2, vocab_size=FIRST + NOISE, ssm_cfg=ssm_cfg, rms_norm=True)
    torch.manual_seed(0)  # the same weights everywhere
    model = context_parallel(MambaLMHeadModel(config).to(device), mesh["context"])
    if options.checkpoint:
        for layer in model.backbone.layers:
            layer.forward = checkpointed(layer.forward)
    if not options.fsdp:
        return DistributedDataParallel(model)
    every = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.backbone.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=every)
    return torch.distributed.fsdp.fully_shard(model, mesh=every)


def checkpointed(forward):
    """forward, which keeps nothing but its inputs and runs again in backward."""
    return lambda *arguments, **others: checkpoint(forward, *arguments, use_reentrant=False, **others)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2, not DDP")
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in backward")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun, as the first line of --help does")
    world = int(os.environ["WORLD_SIZE"])
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.context < 1 or world % options.context or LENGTH % options.context:
        parser.error(f"--context must divide the {world} processes and the length {LENGTH}, got {options.context}")
    if options.fsdp and not hasattr(torch.distributed.fsdp, "fully_shard"):
        parser.error(f"--fsdp needs torch 2.6 or newer, this is {torch.__version__}")
    return options


def main():
    options = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    shape = world // options.context, options.context
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
    model = make_model(options, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + mesh["data"].get_local_rank())  # processes of one context draw the same sequences
    losses = []
    for _ in range(options.steps):
        first = torch.randint(FIRST, (BATCH, 1), device=device)
        tokens = torch.cat([first, FIRST + torch.randint(NOISE, (BATCH, LENGTH - 1), device=device)], dim=1)
        inputs, targets = (split_sequence(part, mesh["context"]) for part in (tokens, first.expand_as(tokens)))
        logits = model(inputs).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results = torch.stack([loss.detach(), (logits.argmax(-1) == targets.flatten()).float().mean()])
        dist.all_reduce(results)  # parts have one length, so the mean over processes is that over steps
        losses.append((results / world).tolist())
    if dist.get_rank() == 0:
        print(f"{shape[0]} x {shape[1]} processes (data x context) on {device.type}, ", end="")
        print("FSDP2" if options.fsdp else "DDP", "with checkpointed activations" if options.checkpoint else "")
        (begin, _), (end, right) = losses[0], losses[-1]
        print(f"loss: {begin:.3f} at first, {end:.3f} at last; {right:.1%} right")
    dist.barrier()  # so that gloo's threads hold no tensor while Python ends: that may abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
