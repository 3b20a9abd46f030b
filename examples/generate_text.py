"""Continues a text with a language model of a checkpoint folder, a hub repository or a GGUF file.

    python examples/generate_text.py [MODEL] [--prompt "Once upon a time"] [--tokens 100] [--quantize]

A tokenizer.json beside the weights, or in the GGUF file, needs `pip install tokenizers`. Without one a model of 256
tokens takes bytes, and others take numbers: --prompt "510 4925". Without MODEL weights and text are random.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from mamba_ssm import MambaLMHeadModel, gguf, quantize
from mamba_ssm.models.config_mamba import MambaConfig


def load(name, device, dtype):
    """The model, and its tokenizer as the contents of a tokenizer.json, or None."""
    if name is None:
        config = MambaConfig(d_model=256, n_layer=4, vocab_size=256, ssm_cfg={"layer": "Mamba2"})
        return MambaLMHeadModel(config, device=device, dtype=dtype), None
    if name.endswith(".gguf"):
        return gguf.load_model(name, device=device, dtype=dtype), gguf.load_tokenizer(name)
    file = Path(name, "tokenizer.json")
    tokenizer = file.read_text("utf-8") if file.is_file() else None
    return MambaLMHeadModel.from_pretrained(name, device=device, dtype=dtype), tokenizer


class Text:
    """Between text and tokens: by a tokenizer, as bytes, or as numbers."""

    def __init__(self, tokenizer, vocabulary):
        self.tokenizer, self.is_bytes = None, vocabulary == 256
        if tokenizer is not None:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(tokenizer)

    def tokens(self, text):
        if self.tokenizer is not None:
            return self.tokenizer.encode(text).ids
        if self.is_bytes:
            return list(text.encode())
        if not all(word.isdigit() for word in text.split()):
            raise ValueError(f"the model has no tokenizer: --prompt must be numbers of tokens, got {text!r}")
        return [int(word) for word in text.split()]

    def text(self, tokens):
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens)
        return bytes(tokens).decode(errors="replace") if self.is_bytes else " ".join(map(str, tokens))


class Progress:
    """A line on a terminal that says how far generate() is; the clock starts with the first new token."""

    def __init__(self, tokens):
        self.tokens, self.done, self.start = tokens, -1, 0.0
        self.shown = sys.stderr.isatty()

    def put(self, value):
        self.done += 1  # the prompt comes first
        if self.done == 1:
            self.start = time.perf_counter()
        if self.shown and self.done > 1:
            print(f"\r{self.done} of {self.tokens} tokens, {self.speed():.0f} a second ", end="", file=sys.stderr)

    def end(self):
        if self.shown:
            print(file=sys.stderr)

    def speed(self):
        return (self.done - 1) / (time.perf_counter() - self.start)


def megabytes(model):
    """Of its parameters; what two modules share counts once."""
    tensors = {id(tensor): tensor for tensor in model.parameters()}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, the name of a hub repository, or a file that ends in .gguf")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=100, help="to generate")
    parser.add_argument("--quantize", action="store_true", help="make the large weights int8")
    parser.add_argument(
        "--dtype", help="such as bfloat16, which a GPU is fast in; by default the weights' own or float32"
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=40, help="1: always the most probable token")
    parser.add_argument("--threads", type=int, help="of a CPU")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens must be at least 2, got {options.tokens}")
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, tokenizer = load(options.model, device, options.dtype)
        text = Text(tokenizer, model.config.vocab_size)
        prompt = text.tokens(options.prompt)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    if not prompt:
        parser.error("--prompt must not be empty")
    model.eval()
    size = megabytes(model)
    print(f"{options.model or 'random weights'}: {len(model.backbone.layers)} layers, {size:.1f} MB on {device}")
    if options.quantize:
        print(f"as int8: {megabytes(quantize(model)):.1f} MB")

    progress = Progress(options.tokens)
    sampling = {"top_k": options.top_k, "temperature": options.temperature}
    given = torch.tensor([prompt], device=device)
    length = len(prompt) + options.tokens
    try:
        tokens = model.generate(given, length, cg=device == "cuda", streamer=progress, **sampling)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.tokens} tokens behind a prompt of {len(prompt)}, {progress.speed():.0f} tokens a second\n")
    print(text.text(tokens[0].tolist()))


if __name__ == "__main__":
    main()
