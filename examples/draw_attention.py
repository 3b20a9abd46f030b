"""Trains a Mamba-2 block to remember the one marked token of a sequence, and draws what its scan attends to.

    python examples/draw_attention.py [--steps 500] [--draw attention.png]

A scan is linear in its input: y = M x, with a causal matrix M for each head. Row i of M is what step i takes from the
steps before it, an attention without softmax. Here the last row of a head shows the marked step, wherever it is.
"""

import argparse
import os
import struct
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm import Mamba2
from mamba_ssm.utils.attention import attention_maps

TOKENS, LENGTH, BATCH = 8, 24, 32
SCALE = 8  # pixels of an element of M, each way


def sequences(batch, device):
    """Tokens (batch, LENGTH) of which one is marked, by adding TOKENS; the marked tokens; and their steps."""
    tokens = torch.randint(TOKENS, (batch, LENGTH), device=device)
    steps = torch.randint(LENGTH - 1, (batch,), device=device)
    every = torch.arange(batch, device=device)
    marked = tokens[every, steps].clone()
    tokens[every, steps] += TOKENS
    return tokens, marked, steps


class Recall(nn.Module):
    """(B, L) -> (B, TOKENS), from the block's output at the last step."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(2 * TOKENS, width)
        self.block = Mamba2(d_model=width, d_state=16, headdim=16)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens))[:, -1])


def write_png(file, matrix):
    """|matrix| (rows, columns) in shades of grey, black for the largest."""
    shades = 255 - (255 * matrix.abs() / matrix.abs().max().clamp_min(1e-20)).round()
    shades = shades.to(torch.uint8).repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1).cpu()
    height, width = shades.shape

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + bytes(line) for line in shades.tolist())  # 0: a line is stored as it is
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey a pixel
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    Path(file).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--draw", metavar="FILE", help="draw M of the head that attends most sharply, as .png")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.draw and not options.draw.endswith(".png"):
        parser.error(f"--draw: the file must end in .png, got {options.draw}")
    if options.draw and not os.access(Path(options.draw).parent, os.W_OK):
        parser.error(f"--draw: {options.draw} cannot be written")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would wait for each other: the model is small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Recall().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1, options.steps + 1):
        tokens, marked, _ = sequences(BATCH, device)
        loss = F.cross_entropy(model(tokens), marked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"\rstep {step} of {options.steps}, loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    tokens, marked, steps = sequences(500, device)
    with torch.no_grad():
        right = (model(tokens).argmax(1) == marked).float().mean().item()
    print(f"{100 * right:.1f}% right of 500 new sequences")
    (found,) = attention_maps(model, tokens, rows=[-1])
    attended = found.matrix[:, :, 0].abs()  # (B, heads, L), of the last step
    # The convolution sees four steps, so what a step holds enters the scan there and in the three steps behind it.
    reach = torch.arange(LENGTH, device=device) - steps[:, None]
    within = attended * ((reach >= 0) & (reach < 4))[:, None]
    share = within.sum(2) / attended.sum(2)
    for head, each in enumerate(share.mean(0).tolist()):
        print(f"head {head}: {100 * each:.0f}% of what the last step takes is from the marked step and the 3 after it")
    if options.draw:
        head = share.mean(0).argmax().item()
        write_png(options.draw, attention_maps(model, tokens[:1], heads=[head])[0].matrix[0, 0])
        print(f"wrote {options.draw}: head {head}, a sequence with step {steps[0].item()} marked")


if __name__ == "__main__":
    main()
