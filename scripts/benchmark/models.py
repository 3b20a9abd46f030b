"""The models' sections: tokens a second of a language model, and transformers' models with and without this package."""

import statistics
import time

import cases
import progress
import torch
import transformers_models
from timing import load
from validate import check

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

# ---- tokens a second -------------------------------------------------------------------------------------------------


def _validate(model, tokens):
    """In float32, the scores of steps are the logits of one forward."""
    wide = MambaLMHeadModel(model.config, device=tokens.device)
    wide.load_state_dict(model.state_dict())
    output = wide.generate(
        tokens[:, :1], tokens.shape[1], teacher_outputs=tokens, output_scores=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        expected = wide(tokens).logits[:, :-1]
    # thousands of rounded sums in each of 24 layers: bfloat16's limits leave room for float32, and none for an error
    check("scores of steps", torch.stack(output.scores, dim=1), expected, torch.bfloat16)


def _seconds_a_token(name, model, prompt, new, cg):
    """Median of the time that `new` more tokens take."""
    synchronize = torch.cuda.synchronize if prompt.is_cuda else (lambda: None)

    def seconds(length):
        synchronize()
        start = time.perf_counter()
        model.generate(prompt, length, cg=cg)
        synchronize()
        return time.perf_counter() - start

    short, long = prompt.shape[1] + 1, prompt.shape[1] + 1 + new
    seconds(long)  # the graph of the longest comes first, and serves both
    times = []
    for turn in range(cases.LM_REPEATS):
        progress.show(f"{name}, {new} tokens", f"({turn + 1} of {cases.LM_REPEATS})")
        times.append(seconds(long) - seconds(short))
    return statistics.median(times) / new


def lm(machine):
    """Greedy decoding of a 130M-size model with random weights."""
    device = machine["device"]
    rows = []
    for case in cases.LMS[device]:
        progress.show(case.name, "(making and checking it)")
        torch.manual_seed(0)
        if device == "cpu":
            torch.set_num_threads(cases.CPU_THREADS)
        config = MambaConfig(d_model=case.d_model, n_layer=case.n_layer, ssm_cfg={"layer": case.layer})
        model = MambaLMHeadModel(config, device=device, dtype=case.dtype)
        tokens = torch.randint(0, config.vocab_size, (case.batch, cases.LM_PROMPT), device=device)
        _validate(model, tokens[:, : cases.LM_VALIDATED])
        plain = _seconds_a_token(case.name, model, tokens, case.new, cg=False)
        row = {
            "case": case.name,
            "parameters M": sum(parameter.numel() for parameter in model.parameters()) * 1e-6,
            "tokens/s": case.batch / plain,
        }
        if device == "cuda":
            expected = model.generate(tokens, cases.LM_PROMPT + 32)
            if not torch.equal(model.generate(tokens, cases.LM_PROMPT + 32, cg=True), expected):
                raise AssertionError(f"{case.name}: a CUDA graph gives other tokens")
            row["tokens/s, CUDA graph"] = case.batch / _seconds_a_token(case.name, model, tokens, case.new, cg=True)
        else:
            row["load"] = load()
        rows.append(row)
        del model
    return rows


# ---- transformers ----------------------------------------------------------------------------------------------------


def transformers(machine):
    """transformers' models with this package's kernels, against the same models without, in one process.

    On the CPU one thread's processor time: what else the machine does is then nearly no matter.
    """
    device = machine["device"]
    if device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for kind, config in cases.TRANSFORMERS_MODELS.items():
        pair = transformers_models.model_pair(kind, config, device)[:2]
        tokens = torch.randint(1, 50, (cases.TRANSFORMERS_BATCH, cases.TRANSFORMERS_SEQLEN), device=device)
        with torch.no_grad():
            ours, theirs = (model.eval()(tokens).logits for model in pair)
        check("logits", ours, theirs, torch.bfloat16)  # theirs is float32 too: only gross errors show
        row = {"case": f"{kind} B{cases.TRANSFORMERS_BATCH} L{cases.TRANSFORMERS_SEQLEN}"}
        for name, run in (("forward", _forward), ("train", _train), ("generate", _generate)):
            mine, others = _medians(f"{kind}, {name}", run, pair, tokens)
            row[f"{name} x"] = others / mine
            row[f"{name} ms"] = mine * 1e3
        rows.append(row)
    return rows


def _medians(name, run, pair, tokens):
    """Median seconds of each of the two models, which take turns."""
    clock = time.perf_counter if tokens.is_cuda else time.process_time
    times = [[], []]
    for turn in range(cases.TRANSFORMERS_REPEATS + 1):
        progress.show(name, f"({turn} of {cases.TRANSFORMERS_REPEATS})" if turn else "(warm-up)")
        for model, seconds in zip(pair, times, strict=True):
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
