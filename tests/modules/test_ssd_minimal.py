"""ssd_minimal against the step-by-step reference."""

import pytest
import torch

from mamba_ssm.modules.ssd_minimal import segsum, ssd_minimal_discrete


def by_steps(X, A, B, C, state):
    B, C = (matrix.repeat_interleave(X.shape[2] // matrix.shape[2], dim=2) for matrix in (B, C))
    out = []
    for t in range(X.shape[1]):
        state = state * torch.exp(A[:, t, :, None, None]) + torch.einsum("bhp,bhn->bhpn", X[:, t], B[:, t])
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(out, 1), state


def test_segsum():
    x = torch.tensor([1.0, 2.0, 4.0])
    inf = torch.inf
    assert segsum(x).tolist() == [[0, -inf, -inf], [2, 0, -inf], [6, 4, 0]]
    assert segsum(x.expand(2, 5, 3)).shape == (2, 5, 3, 3)


@pytest.mark.parametrize("initial", [None, 4, 5], ids=["zero", "4_dims", "5_dims"])
@pytest.mark.parametrize("seqlen,block_len,groups", [(24, 8, 4), (31, 8, 2), (1, 64, 1), (7, 1, 4)])
def test_against_steps(seqlen, block_len, groups, initial, device):
    batch, heads, headdim, dstate = 2, 4, 5, 3
    tensors = [
        torch.randn(batch, seqlen, heads, headdim),
        -torch.rand(batch, seqlen, heads),
        torch.randn(batch, seqlen, groups, dstate),
        torch.randn(batch, seqlen, groups, dstate),
        torch.zeros(batch, heads, headdim, dstate) if initial is None else torch.randn(batch, heads, headdim, dstate),
    ]
    tensors = [tensor.double().to(device).requires_grad_() for tensor in tensors]
    *inputs, state = tensors
    given = {None: None, 4: state, 5: state[:, None]}[initial]
    found = ssd_minimal_discrete(*inputs, block_len, given)
    expected = by_steps(*inputs, state)
    torch.testing.assert_close(found, expected)
    wanted = tensors if initial else inputs
    grads = [torch.autograd.grad((y.sin().sum() + s.sin().sum()), wanted) for y, s in (found, expected)]
    torch.testing.assert_close(*grads)


def test_clear_errors():
    X, A, B = torch.randn(1, 8, 4, 2), torch.randn(1, 8, 4), torch.randn(1, 8, 3, 2)
    with pytest.raises(ValueError, match="4 heads must be a multiple of the groups of B and C, got 3 and 3"):
        ssd_minimal_discrete(X, A, B, B, 4)
    with pytest.raises(ValueError, match="block_len must be a positive integer, got 0"):
        ssd_minimal_discrete(X, A, B[:, :, :1], B[:, :, :1], 0)
    with pytest.raises(TypeError, match=r"A must have X's dtype, torch.float32, got torch.float64"):
        ssd_minimal_discrete(X, A.double(), B, B, 4)
