"""Decoding on the CPU beside llama.cpp: the same weights, one process, in turns, each first in half of them.

python beside_llama_cpp.py LAYER TYPE THREADS prints what one case measures, as JSON.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import cases
import llama_cpp
import plain
import progress
import torch

import mamba_ssm
from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils.generation import InferenceParams

installed = llama_cpp.installed


def measure(threads):
    """The rows of all cases with each number of threads."""
    rows = []
    for layer in cases.BESIDE_LLAMA_CPP["layers"]:
        for kind in cases.BESIDE_LLAMA_CPP["types"]:
            for count in threads:
                isa = os.environ.get(plain.ISA_SWITCH)
                name = f"{layer} {kind}, {count} threads"
                found = plain.in_own_process(name, isa, __file__, layer, kind, str(count))
                rows.append({"case": f"{layer} {kind}", "threads": count, **found, "load": plain.load()})
    return rows


def one_case(layer, kind, threads, n_layer=24, d_model=768, vocabulary=50280, prompt=512, new=32, rounds=10):
    """A row's columns: medians over rounds, in which the two take turns."""
    from mamba_ssm.gguf import export_model  # which few need

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = MambaConfig(d_model=d_model, n_layer=n_layer, vocab_size=vocabulary, ssm_cfg={"layer": layer})
    model = MambaLMHeadModel(config).eval()
    progress.show("writing the file")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        export_model(model, file, type=kind)
        theirs = llama_cpp.Model(file, model.vocab_size, threads)
        if kind == "q8_0":
            model = mamba_ssm.quantize(model)
        else:
            model = model.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind])
        tokens = torch.randint(vocabulary, (8, prompt))
        sides = {"ours": partial(_ours, model, tokens[:1], new), "theirs": partial(_theirs, theirs, tokens[0], new)}
        times = {name: [] for name in sides}
        for turn in range(rounds + 1):
            progress.show("ours and llama.cpp", f"({turn} of {rounds})" if turn else "(warm-up)")
            order = ("ours", "theirs") if turn % 2 else ("theirs", "ours")
            found = {name: sides[name]() for name in order}
            if turn:
                for name, (*seconds, _) in found.items():
                    times[name].append(seconds)
        progress.show("a batch of 8")
        eight = statistics.median(_ours(model, tokens, new)[1] for _ in range(3))
        theirs.close()
    ours, others = ([statistics.median(column) for column in zip(*times[name], strict=True)] for name in sides)
    return {
        "step x": others[1] / ours[1],
        "step ms": ours[1] * 1e3,
        "llama.cpp step ms": others[1] * 1e3,
        "prefill x": others[0] / ours[0],
        "prefill ms": ours[0] * 1e3,
        "llama.cpp prefill ms": others[0] * 1e3,
        "batch of 8 x": 8 * ours[1] / eight,
        "apart": _apart(kind, found["ours"][2], found["theirs"][2]),
    }


@torch.inference_mode()
def _ours(model, tokens, new):
    """(seconds of the prompt, of a step, the logits behind the last step)."""
    params = InferenceParams(max_seqlen=tokens.shape[1] + new, max_batch_size=len(tokens))
    start = time.perf_counter()
    model(tokens, inference_params=params, num_last_tokens=1)
    prefill, start = time.perf_counter() - start, time.perf_counter()
    for step in range(new):
        params.seqlen_offset = tokens.shape[1] + step
        logits = model(tokens[:, step : step + 1], inference_params=params, num_last_tokens=1).logits
    return prefill, (time.perf_counter() - start) / new, logits[0, -1].float()


def _theirs(model, tokens, new):
    """The same of llama.cpp."""
    values = tokens.to(torch.int32)
    model.forget()
    start = time.perf_counter()
    model.decode(values)
    prefill, start = time.perf_counter() - start, time.perf_counter()
    for step in range(new):
        logits = model.decode(values[step : step + 1])
    return prefill, (time.perf_counter() - start) / new, logits.clone()


def _apart(kind, ours, theirs):
    """The greatest difference of logits, of the greatest logit. Raises where both should compute the same and do not:
    of float32 weights by more than the order of its sums explains, of others by more than their rounding.
    """
    apart = ((ours[: len(theirs)] - theirs).abs().max() / theirs.abs().max()).item()
    most = 1e-4 if kind == "f32" else 0.1
    if not apart < most:
        raise RuntimeError(f"{kind}: our logits are {apart:.2g} of the greatest from llama.cpp's, more than {most:.2g}")
    return apart


if __name__ == "__main__":
    print(json.dumps(one_case(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
