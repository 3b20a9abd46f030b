"""Trains a small Mamba-2 language model on the bytes of a text file, then lets it write.

    python examples/train_language_model.py [FILE ...] [--steps 200] [--plot loss.svg]

Without a file it reads this project's documentation. About a minute on two CPU cores; a GPU is used if there is one.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig

BATCH, LENGTH = 8, 256  # sequences a step, bytes a sequence
LEARNING_RATE, WARM_UP = 4e-3, 20  # steps of warm-up


def read(files):
    """The files' bytes as one tensor of tokens, 0 to 255."""
    folder = Path(__file__).resolve().parents[1]
    files = files or [folder / "README.md", *sorted((folder / "docs").glob("*.md"))]
    data = b"".join(Path(file).read_bytes() for file in files)
    if len(data) <= LENGTH + 1:
        sys.exit(f"the text has {len(data)} bytes; it takes more than {LENGTH + 1}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def progress(step, steps, loss, start):
    """One line, rewritten: a bar, the loss and the time that is left."""
    done = step / steps
    left = (time.perf_counter() - start) / done * (1 - done)
    bar = ("#" * round(30 * done)).ljust(30, ".")
    print(f"\r[{bar}] step {step} of {steps}, loss {loss:.3f}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)


def train(model, text, steps):
    """The loss of each step, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - 0.9 * step / steps)
    )
    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        first = torch.randint(len(text) - LENGTH, (BATCH, 1))
        rows = text[first + torch.arange(LENGTH + 1)].to(next(model.parameters()).device)
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress(step, steps, losses[-1], start)
    print(file=sys.stderr)
    return losses


def plot(losses, file, width=640, height=320, margin=40):
    """The losses as an SVG picture."""
    top = max(losses)
    across, down = (width - 2 * margin) / max(1, len(losses) - 1), (height - 2 * margin) / top
    points = " ".join(f"{margin + i * across:.1f},{height - margin - loss * down:.1f}" for i, loss in enumerate(losses))
    axes = f"M{margin},{margin}V{height - margin}H{width - margin}"
    Path(file).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/><path d="{axes}" fill="none" stroke="gray"/>\n'
        f'<polyline points="{points}" fill="none" stroke="steelblue" stroke-width="1.5"/>\n'
        f'<text x="{margin}" y="{margin - 10}">loss, nats a byte; it begins at {losses[0]:.2f}</text>\n'
        f'<text x="{width - margin}" y="{height - margin + 20}" text-anchor="end">step {len(losses)}</text>\n'
        "</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="text files (default: this project's documentation)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="write the loss of each step as an SVG picture")
    parser.add_argument("--prompt", default="The wheel ", help="what the model continues in the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = read(options.files)
    config = MambaConfig(
        d_model=128, n_layer=4, vocab_size=256, ssm_cfg={"layer": "Mamba2", "d_state": 32, "headdim": 32}
    )
    model = MambaLMHeadModel(config, device=device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text)} bytes of text, a model of {parameters} parameters on {device}")

    losses = train(model, text, options.steps)
    some = max(1, min(20, len(losses) // 2))
    first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
    print(f"loss: {first:.3f} at first, {last:.3f} at last (means of {some} steps)")
    if options.plot:
        plot(losses, options.plot)
        print(f"wrote {options.plot}")

    prompt = torch.tensor([list(options.prompt.encode())], device=device)
    model.eval()
    written = model.generate(prompt, max_length=prompt.shape[1] + 200, top_k=20, temperature=0.6)
    print(f"\n{bytes(written[0].tolist()).decode(errors='replace')}")


if __name__ == "__main__":
    main()
