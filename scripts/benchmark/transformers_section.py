"""transformers' models with this package's kernels against the same models without, in one process."""

import importlib.util
import statistics
import time

import cases
import progress
import torch
import transformers_models
from validate import check


def measure(device):
    """On the CPU one thread's processor time: what else the machine does is then nearly no matter."""
    if device == "cpu":
        torch.set_num_threads(1)
    # The second without causal_conv1d, where that is installed; the last without either.
    installed = [("mamba_ssm",), ()]
    if importlib.util.find_spec("causal_conv1d"):
        installed.insert(0, ("mamba_ssm", "causal_conv1d"))
    rows = []
    for kind, config in cases.TRANSFORMERS_MODELS.items():
        _, tiny = transformers_models.TINY[kind]  # which layers are of which kind
        models, _ = transformers_models.same_models(kind, {**tiny, **config}, installed, device)
        tokens = torch.randint(1, 50, (cases.TRANSFORMERS_BATCH, cases.TRANSFORMERS_SEQLEN), device=device)
        with torch.no_grad():
            ours, *_, theirs = (model.eval()(tokens).logits for model in models)
        check("logits", ours, theirs, torch.bfloat16)  # theirs is float32 too: only gross errors show
        row = {"case": f"{kind} B{cases.TRANSFORMERS_BATCH} L{cases.TRANSFORMERS_SEQLEN}"}
        for name, run in (("forward", _forward), ("train", _train), ("generate", _generate)):
            mine, *between, others = _medians(f"{kind}, {name}", run, models, tokens)
            row[f"{name} x"] = others / mine
            if between:
                row[f"{name} convolution x"] = between[0] / mine
            row[f"{name} ms"] = mine * 1e3
        rows.append(row)
    return rows


def _medians(name, run, models, tokens):
    """Median seconds of each of the models, which take turns."""
    clock = time.perf_counter if tokens.is_cuda else time.process_time
    times = [[] for _ in models]
    for turn in range(cases.TRANSFORMERS_REPEATS + 1):
        progress.show(name, f"({turn} of {cases.TRANSFORMERS_REPEATS})" if turn else "(warm-up)")
        for model, seconds in zip(models, times, strict=True):
            start = clock()
            run(model, tokens)
            if tokens.is_cuda:
                torch.cuda.synchronize()
            if turn:  # the first warms up
                seconds.append(clock() - start)
    return [statistics.median(seconds) for seconds in times]


def _forward(model, tokens):
    with torch.no_grad():
        model.eval()(tokens, use_cache=False)


def _train(model, tokens):
    model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
    model.zero_grad()


def _generate(model, tokens):
    prompt = tokens[:, : cases.TRANSFORMERS_PROMPT]
    mask, new = torch.ones_like(prompt), cases.TRANSFORMERS_NEW
    model.eval().generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None)
