"""How parts of a sequence that lie on different devices, or in different segments, pass on their states."""

import torch


def pass_on(states: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What parts that follow one another, (parts, ...), pass on together: of each, the state that it ends with if it
    starts from zero, and the factor by which it multiplies what it starts with (which broadcasts against the state).
    """
    if len(states) == 1:
        return states[0], factors[0]
    after = torch.ones_like(factors)  # the product of the factors of all later parts
    after[:-1] = factors[1:].flip(0).cumprod(0).flip(0)
    passed = states * after
    # a state of zero stays zero even where the factors have overflowed, as it would step by step
    return torch.where(states == 0, states, passed).sum(0), after[0] * factors[0]
