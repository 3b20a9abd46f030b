"""Trains two VMamba-like blocks to read digits that it draws itself, with noise, anywhere in the image.

    python examples/classify_images.py [--steps 500]

A quarter of a minute on one CPU core; a GPU is used if there is one.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm.ops.cross_selective_scan import cross_selective_scan

BATCH, SIZE, NOISE = 32, 16, 0.3
# The lit segments of each digit on a display: top, upper left, upper right, middle, lower left, lower right, bottom.
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")


def draw(digit, height, width):
    """An image (height, width) of a digit."""
    image, middle = torch.zeros(height, width), height // 2
    strokes = (
        (slice(0, 1), slice(None)),
        (slice(0, middle), slice(0, 1)),
        (slice(0, middle), slice(width - 1, None)),
        (slice(middle, middle + 1), slice(None)),
        (slice(middle, None), slice(0, 1)),
        (slice(middle, None), slice(width - 1, None)),
        (slice(height - 1, None), slice(None)),
    )
    for lit, stroke in zip(DIGITS[digit], strokes, strict=True):
        if lit == "1":
            image[stroke] = 1
    return image


def pictures(batch, device):
    """Images (batch, 1, SIZE, SIZE) of digits of different sizes and places, and the digits (batch)."""
    digits = torch.randint(10, (batch,))
    images = NOISE * torch.randn(batch, 1, SIZE, SIZE)
    for image, digit in zip(images[:, 0], digits.tolist(), strict=True):
        height, width = int(torch.randint(9, 15, ())), int(torch.randint(6, 10, ()))
        top, left = int(torch.randint(SIZE - height, ())), int(torch.randint(SIZE - width, ()))
        image[top : top + height, left : left + width] += draw(digit, height, width)
    return images.to(device), digits.to(device)


class ScanBlock(nn.Module):
    """(B, H, W, width) -> the same: projection, depthwise convolution, scans in four directions, gate, projection."""

    def __init__(self, width, dstate=8, rank=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.in_proj = nn.Linear(width, 2 * width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.x_proj_weight = nn.Parameter(torch.randn(4, rank + 2 * dstate, width) * width**-0.5)
        self.dt_proj_weight = nn.Parameter(torch.randn(4, width, rank) * rank**-0.5)
        self.dt_bias = nn.Parameter(torch.empty(4, width).uniform_(-5, -2))  # dt from 0.007 to 0.13
        self.A_log = nn.Parameter(torch.arange(1.0, dstate + 1).log().repeat(4, width, 1))
        self.D = nn.Parameter(torch.ones(4, width))
        self.out_norm = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, images):
        x, z = self.in_proj(self.norm(images)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.permute(0, 3, 1, 2)))
        weights = self.x_proj_weight, self.dt_proj_weight
        y = cross_selective_scan(x, *weights, -torch.exp(self.A_log), self.D, self.dt_bias)
        return images + self.out_proj(self.out_norm(y.permute(0, 2, 3, 1)) * F.silu(z))


class Classifier(nn.Module):
    """(B, 1, SIZE, SIZE) -> (B, 10): patches of 2 x 2, blocks, the mean over the image."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.Sequential(*(ScanBlock(width) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images):
        x = self.blocks(self.patches(images).permute(0, 2, 3, 1))
        return self.head(x.mean(dim=(1, 2)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would wait for each other: the model is small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.steps)
    for step in range(1, options.steps + 1):
        images, digits = pictures(BATCH, device)
        loss = F.cross_entropy(model(images), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"\rstep {step} of {options.steps}, loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    with torch.no_grad():
        images, digits = pictures(1000, device)
        right = (model(images).argmax(dim=1) == digits).float().mean().item()
    print(f"{right:.1%} right of {len(digits)} new pictures")


if __name__ == "__main__":
    main()
