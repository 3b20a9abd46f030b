"""Trains a small Mamba-2 language model on the bytes of a text, then lets it write.

    python examples/train_language_model.py [FILE ...] [--steps 600] [--plot loss.svg] [--graph]

Without a file it makes a text of its own: sentences whose verb agrees with a noun four or five words before it, and not
with the noun just before it. The model must carry that noun's number in its state.

A quarter of a minute on one CPU core; a GPU is used if there is one. With --graph it runs each step as one CUDA graph.
"""

import argparse
import importlib.util
import os
import random
import re
import sys
import time
from pathlib import Path

import torch

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig

BATCH, LENGTH = 8, 128  # sequences a step, bytes a sequence
LEARNING_RATE, WARM_UP = 1e-2, 20  # steps of warm-up
BEFORE_CAPTURE = 3  # steps that run without a graph first
ROWS, WRITTEN = 16, 200  # texts that the model writes in the end, bytes each

ADJECTIVES = "old", "small", "red", "quiet"
NOUNS = "bird", "boat", "cloud", "garden", "house", "river"
PREPOSITIONS = "near", "behind", "beside", "under"
VERBS = "wait", "sleep", "sing", "shine"


def sentence(choose):
    """'The old boat near the rivers waits.'"""
    subject, other = (choose(("", f"{choose(ADJECTIVES)} ")) + choose(NOUNS) for _ in range(2))
    plural, others = choose(("", "s")), choose(("", "s"))
    verb = choose(VERBS) + ("" if plural else "s")
    return f"The {subject}{plural} {choose(PREPOSITIONS)} the {other}{others} {verb}."


def is_right(text):
    """Whether this is one of those sentences: every word known and in its place, and the verb in the right number."""
    adjective, noun, preposition, verb = map("|".join, (ADJECTIVES, NOUNS, PREPOSITIONS, VERBS))
    phrase = f"(?:(?:{adjective}) )?(?:{noun})"
    found = re.fullmatch(rf"The {phrase}(s?) (?:{preposition}) the {phrase}s? (?:{verb})(s?)\.", text)
    return found is not None and found[1] != found[2]


def read(files):
    """The files' bytes, or those of 2000 sentences, as one tensor of tokens, 0 to 255."""
    choose = random.Random(0).choice
    data = b"".join(Path(file).read_bytes() for file in files)
    if not files:
        data = " ".join(sentence(choose) for _ in range(2000)).encode()
    if len(data) <= LENGTH + 1:
        raise ValueError(f"the text has {len(data)} bytes; it takes more than {LENGTH + 1}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def progress(step, steps, loss, start):
    """One line, rewritten: a bar, the loss and the time that is left."""
    done = step / steps
    left = (time.perf_counter() - start) / done * (1 - done)
    bar = ("#" * round(30 * done)).ljust(30, ".")
    print(f"\r[{bar}] step {step} of {steps}, loss {loss:.3f}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)


def captured(step):
    """The step as a CUDA graph: a function that replays it, on what its tensors then hold.

    Kernels are loaded and the optimizer's states made by the steps before, on a stream of their own as torch asks for.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(BEFORE_CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss

    return replay


def train(model, text, steps, graph=False):
    """The loss of each step, in nats a byte; graph: each step is the replay of a captured one."""
    device = next(model.parameters()).device
    # What changes from step to step is in two tensors, which a graph reads: the learning rate, and the batch.
    rate = torch.tensor(LEARNING_RATE, device=device)
    rows = torch.empty(BATCH, LENGTH + 1, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, capturable=device.type == "cuda")

    def one_step():
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        first = torch.randint(len(text) - LENGTH, (BATCH, 1))
        rows.copy_(text[first + torch.arange(LENGTH + 1)])
        rate.fill_(LEARNING_RATE * min(step / WARM_UP, 1 - 0.9 * (step - 1) / steps))
        if graph and step == 1:
            one_step = captured(one_step)
        losses.append(one_step().item())
        progress(step, steps, losses[-1], start)
    print(file=sys.stderr)
    return losses


def plot(losses, file):
    """The losses as a picture."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 15, "svg.fonttype": "none", "svg.hashsalt": "loss"}):
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(
            xlabel="step", ylabel="loss, nats a byte", xlim=(0, len(losses)), ylim=(0, max(losses))
        )
        axes.plot(losses)
        axes.grid(alpha=0.4)
        figure.savefig(file)


def write(model, prompt, device):
    """ROWS texts that begin with the prompt."""
    rows = torch.tensor([list(prompt.encode())] * ROWS, device=device)
    written = model.eval().generate(rows, max_length=rows.shape[1] + WRITTEN, top_k=20, temperature=0.6)
    return [bytes(row).decode(errors="replace") for row in written.tolist()]


def arguments():
    """The options, and the text: whatever is wrong with either is said in one line before anything is trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="text files (default: sentences that it makes itself)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--plot", metavar="FILE", help="draw the loss of each step, as .svg or .png (needs matplotlib)")
    parser.add_argument("--graph", action="store_true", help="run each step as one CUDA graph (needs a GPU)")
    parser.add_argument("--prompt", default="The ", help="what the model continues in the end")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if not options.prompt:
        parser.error("--prompt must not be empty")
    if options.graph and not torch.cuda.is_available():
        parser.error("--graph needs an NVIDIA GPU, and torch finds none; without it the same steps run on the CPU")
    if options.plot:
        plot_file = Path(options.plot)
        if plot_file.suffix not in (".svg", ".png"):
            parser.error(f"--plot: the file must end in .svg or .png, got {options.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        if not os.access(plot_file if plot_file.exists() else plot_file.parent, os.W_OK) or plot_file.is_dir():
            parser.error(f"--plot: {options.plot} cannot be written")
    try:
        return options, read(options.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main():
    options, text = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would wait for each other: the model is small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = MambaConfig(
        d_model=64, n_layer=2, vocab_size=256, ssm_cfg={"layer": "Mamba2", "d_state": 32, "headdim": 32}
    )
    model = MambaLMHeadModel(config, device=device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text)} bytes of text, a model of {parameters} parameters on {device}")

    losses = train(model, text, options.steps, options.graph)
    some = max(1, min(20, len(losses) // 2))
    first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
    print(f"loss: {first:.3f} at first, {last:.3f} at last (means of {some} steps)")
    if options.plot:
        plot(losses, options.plot)
        print(f"wrote {options.plot}")

    texts = write(model, options.prompt, device)
    if not options.files:
        sentences = [found for text in texts for found in re.findall(r"\S[^.]*\.", text)]
        right = sum(map(is_right, sentences)) / max(1, len(sentences))
        print(f"{right:.0%} of the {len(sentences)} sentences that it wrote are right")
    print(f"\n{texts[0]}")


if __name__ == "__main__":
    main()
