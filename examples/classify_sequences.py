"""Trains two Mamba blocks to tell four noisy waveforms apart: sine, square, sawtooth, and noise alone.

    python examples/classify_sequences.py [--steps 100]

A quarter of a minute on one CPU core; a GPU is used if there is one.
"""

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm import Mamba

CLASSES = ("sine", "square", "sawtooth", "noise")
BATCH, LENGTH, NOISE = 32, 128, 0.3


def waves(batch, device):
    """Sequences (batch, LENGTH, 1) of random frequency and phase, and their classes (batch)."""
    classes = torch.randint(len(CLASSES), (batch,), device=device)
    frequency = 2 + 6 * torch.rand(batch, 1, device=device)  # periods a sequence
    phase = torch.rand(batch, 1, device=device)
    turns = frequency * torch.linspace(0, 1, LENGTH, device=device) + phase
    sine = torch.sin(2 * math.pi * turns)
    kinds = torch.stack([sine, sine.sign(), 2 * (turns % 1) - 1, torch.zeros_like(sine)])
    chosen = kinds[classes, torch.arange(batch, device=device)]
    return (chosen + NOISE * torch.randn_like(chosen)).unsqueeze(-1), classes


class Classifier(nn.Module):
    """(B, L, 1) -> (B, classes): Mamba blocks with residuals, then the mean over time."""

    def __init__(self, width=64, depth=2):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.blocks = nn.ModuleList(Mamba(d_model=width, d_state=16) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, x):
        x = self.embed(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x.mean(dim=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would wait for each other: the model is small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        x, classes = waves(BATCH, device)
        loss = F.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"\rstep {step} of {options.steps}, loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    with torch.no_grad():
        x, classes = waves(1000, device)
        right = model(x).argmax(dim=1) == classes
    for number, name in enumerate(CLASSES):
        print(f"{name:10} {right[classes == number].float().mean().item():6.1%} right")
    print(f"{'all':10} {right.float().mean().item():6.1%} right of {len(right)} new sequences")


if __name__ == "__main__":
    main()
