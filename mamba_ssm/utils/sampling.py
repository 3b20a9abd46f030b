"""How the next token is chosen from logits."""

import numbers

import torch

from mamba_ssm.ops.linear import greedy_token


def sample(
    logits: torch.Tensor, top_k: int = 1, top_p: float = 0.0, min_p: float = 0.0, temperature: float = 1.0
) -> torch.Tensor:
    """One token for each row of logits (B, vocabulary) -> (B) int64.

    top_k == 1 takes the likeliest. Else the token is drawn from softmax(logits / temperature) after each filter that
    is on: the top_k likeliest (0: off), the likeliest whose probabilities reach top_p together (0 or 1: off;
    arXiv 1904.09751), those at least min_p times as likely as the likeliest (0: off; arXiv 2407.01082).
    """
    if top_k == 1:
        return greedy_token(logits)
    logits = logits.float() / temperature
    indices = None
    if 0 < top_k < logits.shape[-1]:
        logits, indices = torch.topk(logits, top_k, dim=-1)
    if 0.0 < top_p < 1.0:
        ordered, order = torch.sort(logits, dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p  # of the likelier ones alone
        logits = ordered.masked_fill(beyond, -torch.inf)
        indices = order if indices is None else indices.gather(-1, order)
    if min_p > 0.0:
        probabilities = logits.softmax(dim=-1)
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -torch.inf)
    chosen = torch.multinomial(logits.softmax(dim=-1), num_samples=1)
    return (chosen if indices is None else indices.gather(-1, chosen)).squeeze(-1)


def modify_logits_for_top_k_filtering(logits: torch.Tensor, top_k: int) -> None:
    """logits (..., vocabulary), in place: -inf but for the top_k likeliest, and those as likely as the last of them."""
    least = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    logits.masked_fill_(logits < least, -torch.inf)


def modify_logits_for_top_p_filtering(logits: torch.Tensor, top_p: float) -> None:
    """logits (..., vocabulary), in place: -inf but for the likeliest whose probabilities reach top_p together; 0 or 1:
    no change.
    """
    if not 0.0 < top_p < 1.0:
        return
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p  # of the likelier ones alone
    logits.masked_fill_(beyond.scatter(-1, order, beyond), -torch.inf)


def modify_logits_for_min_p_filtering(logits: torch.Tensor, min_p: float) -> None:
    """logits (..., vocabulary), in place: -inf where they are below min_p; 0 or 1: no change. Upstream's rule, which
    reads logits as they are: sample() compares probabilities with min_p times the largest.
    """
    if 0.0 < min_p < 1.0:
        logits.masked_fill_(logits < min_p, -torch.inf)


def modify_logit_for_repetition_penalty(
    logits: torch.Tensor, prev_output_tokens: torch.Tensor, repetition_penalty: float = 1.0
) -> torch.Tensor:
    """logits (B, vocabulary), in place, less likely where a token is in prev_output_tokens (B, L): positive ones are
    divided by the penalty, negative ones multiplied (CTRL, arXiv 1909.05858).
    """
    if repetition_penalty == 1.0:
        return logits
    score = logits.gather(1, prev_output_tokens)
    score = torch.where(score < 0, score * repetition_penalty, score / repetition_penalty)
    return logits.scatter_(1, prev_output_tokens, score)


def check_sampling(top_k: int, top_p: float, min_p: float, temperature: float, repetition_penalty: float) -> None:
    for name, value, fits, expected in (
        ("top_k", top_k, lambda k: k >= 0 and hasattr(k, "__index__"), "an integer, 0 (off) or more"),
        ("top_p", top_p, lambda p: 0.0 <= p <= 1.0, "from 0 (off) to 1"),
        ("min_p", min_p, lambda p: 0.0 <= p <= 1.0, "from 0 (off) to 1"),
        # evaluation harnesses ask for greedy decoding with temperature 0, which top_k=1 does not read
        ("temperature", temperature, lambda t: t > 0.0 or (t == 0.0 and top_k == 1), "positive (top_k=1 is greedy)"),
        ("repetition_penalty", repetition_penalty, lambda penalty: penalty > 0.0, "positive (1 is off)"),
    ):
        if not isinstance(value, (numbers.Real, torch.Tensor)) or not fits(value):
            raise ValueError(f"generate: {name} must be {expected}, got {value!r}")
