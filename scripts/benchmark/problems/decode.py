"""Decoding with a whole language model: its step, and greedy generation."""

import copy
from functools import partial

import references
import torch

from problems.common import dtype_of
from problems.language_model import captured, make, random_tokens

VALIDATED_ROWS, VALIDATED_STEPS = 2, 8


def _scores(model, tokens, cg=False):
    """The scores of each step while the model is made to say tokens."""
    output = model.generate(
        tokens[:, :1],
        tokens.shape[1],
        teacher_outputs=tokens,
        output_scores=True,
        return_dict_in_generate=True,
        cg=cg,
    )
    return torch.stack(output.scores, dim=1)[..., : model.config.vocab_size]  # upstream's are of the padded vocabulary


def _validate(side, model, tokens, graphs):
    """In float32 the steps' scores are the logits of the reference; as it is, a graph's are those without one."""
    some = tokens[:VALIDATED_ROWS, :VALIDATED_STEPS]
    with torch.no_grad():
        expected = references.language_model(copy.deepcopy(model).double(), some)[:, :-1, : model.config.vocab_size]
    side.check_roughly("scores", _scores(copy.deepcopy(model).float(), some), expected, 5e-3)
    if graphs:
        side.check_roughly("scores of a CUDA graph", _scores(model, some, cg=True), _scores(model, some))
        model._decoding_cache = None  # of another batch size


def _step(model, case, side, tokens):
    """A call that takes one token more; the states go on from where they are."""
    params_class = side.function("mamba_ssm.utils.generation:InferenceParams")
    params = params_class(max_seqlen=case.prompt + case.new, max_batch_size=case.batch)
    with torch.inference_mode():
        params.key_value_memory_dict = model.allocate_inference_cache(case.batch, params.max_seqlen)
        model(tokens, inference_params=params, num_last_tokens=1)
    params.seqlen_offset = case.prompt
    token = tokens[:, :1].clone()
    position = torch.full_like(token, case.prompt)

    @torch.inference_mode()
    def step():
        return model(token, position_ids=position, inference_params=params, num_last_tokens=1).logits

    return step


def prepare(case, device, side):
    model = make(case, device, side, dtype_of(case))
    tokens = random_tokens(case, device, max(case.prompt, VALIDATED_STEPS))
    graphs = any("graph" in which for which in case.passes)
    _validate(side, model, tokens, graphs)
    prompt = tokens[:, : case.prompt]
    step = _step(model, case, side, prompt)
    generate = partial(model.generate, prompt, case.prompt + case.new)
    calls = {"step": [step], "generate": [generate]}
    if graphs:
        calls |= {"step, graph": [captured(step)], "generate, graph": [partial(generate, cg=True)]}
    return calls
