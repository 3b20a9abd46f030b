"""The cross entropy's operator against torch's own in float64, on both devices."""

import math

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id

from mamba_ssm.ops import linear_cross_entropy as pieces
from mamba_ssm.ops.cross_entropy import Inputs, Options, cross_entropy_

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
OPTIONS = {
    "plain": Options(-100, 0.0, 0.0),
    "smoothing": Options(-100, 0.1, 0.0),
    "all smooth": Options(-100, 1.0, 0.0),
    "z": Options(-100, 0.0, 1e-2),
    "all": Options(3, 0.2, 1e-3),
}
SIZES = [(0, 5), (1, 1), (3, 1), (4, 2), (7, 131), (5, 1031), (2, 50277)]


def results(logits, labels, options, dtype=None, want_gradient=True):
    """Losses and gradients of the operator, or with a dtype torch's own in it."""
    if dtype is None:
        written, losses = logits.clone(memory_format=torch.preserve_format), logits.new_empty(len(labels)).float()
        cross_entropy_(Inputs(written, losses, labels), options, want_gradient)
        return {"losses": losses, "gradients": written}
    logits = logits.detach().to(dtype).requires_grad_()
    ignore = {"ignore_index": options.ignore_index}
    losses = F.cross_entropy(logits, labels, **ignore, label_smoothing=options.label_smoothing, reduction="none")
    if options.z_loss:
        squares = logits.logsumexp(1).square()
        losses = losses + options.z_loss * torch.where(labels == options.ignore_index, 0, squares)
    return {"losses": losses.detach(), "gradients": torch.autograd.grad(losses.sum(), logits)[0]}


def check(logits, labels, options):
    found = results(logits, labels, options)
    plain, truth = (results(logits, labels, options, dtype) for dtype in (torch.float32, torch.float64))
    plain["gradients"] = plain["gradients"].to(logits.dtype)
    # The label's own gradient is what smoothing leaves of 1.
    assert_close_to_truth(found, plain, truth, cancelled={"gradients": 1.0 if options.label_smoothing else 0.0})


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, size, dtype, device):
    logits, labels = 2 * torch.randn(size, device=device).to(dtype), torch.randint(size[1], size[:1], device=device)
    labels[1::3] = OPTIONS[options].ignore_index
    check(logits, labels, OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("gap", [1, 3, 8])
def test_rows_apart(gap, dtype, device):
    """Rows may begin between multiples of 16 bytes, and what lies between them stays."""
    memory = torch.randn(6, 203 + gap, device=device).to(dtype)
    logits, labels = memory[:, gap:], torch.randint(203, (12,), device=device)[::2]
    expected = results(logits.contiguous(), labels, OPTIONS["all"])
    before, losses = memory[:, :gap].clone(), torch.empty(6, device=device)
    cross_entropy_(Inputs(logits, losses, labels), OPTIONS["all"], True)
    assert torch.equal(memory[:, :gap], before)
    # The order of sums depends on where a row begins.
    torch.testing.assert_close({"losses": losses, "gradients": logits}, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", ["plain", "smoothing", "z"])
def test_extreme_logits(options, dtype, device):
    logits, labels = torch.randn(4, 99, device=device), torch.tensor([7, 50, 98, 0], device=device)
    logits[0] += 1e4
    logits[1] *= 1e4
    logits[2] -= 3e4
    check(logits.to(dtype), labels, OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", OPTIONS)
def test_infinities_and_nan(options, dtype, device):
    logits, labels = torch.randn(7, 77, device=device).to(dtype), torch.full((7,), 5, device=device)
    logits[0, 20:40] = -math.inf
    logits[1] = -math.inf
    logits[2, 76] = math.nan
    logits[3, 30] = math.inf
    logits[4, 5] = -math.inf
    if not OPTIONS[options].z_loss:  # whose slope is infinite there
        logits[5] = torch.finfo(dtype).min
    found, truth = (results(logits, labels, OPTIONS[options], d) for d in (None, torch.float32))
    truth["gradients"] = truth["gradients"].to(dtype)
    torch.testing.assert_close(found, truth, equal_nan=True, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_what_is_ignored_and_what_is_wrong(dtype, device):
    logits = torch.randn(5, 40, device=device).to(dtype)
    logits[1] = math.nan
    labels = torch.tensor([3, -100, 40, -1, 39], device=device)
    found = results(logits, labels, OPTIONS["smoothing"])
    assert found["losses"][1] == 0 and not found["gradients"][1].any()
    assert found["losses"][2:4].isnan().all() and found["gradients"][2:4].isnan().all()
    right = [0, 4]
    check(logits[right], labels[right], OPTIONS["smoothing"])
    for name, tensor in results(logits[right], labels[right], OPTIONS["smoothing"]).items():
        assert torch.equal(found[name][right], tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_a_probability_near_one_keeps_its_gradient(dtype, device):
    logits, labels = (
        torch.tensor([[9.0, 0.0]], device=device).to(dtype),
        torch.zeros(1, dtype=torch.long, device=device),
    )
    (gradient,) = results(logits, labels, OPTIONS["plain"])["gradients"]
    torch.testing.assert_close(
        gradient.double().cpu(), torch.tensor([-1.0, 1.0]).double() / (1 + math.exp(9)), rtol=4e-3, atol=0
    )


def test_without_gradients_logits_stay(device):
    logits, labels = torch.randn(3, 50, device=device), torch.tensor([1, 3, 2], device=device)
    options = OPTIONS["all"]
    found, expected = results(logits, labels, options, want_gradient=False), results(logits, labels, options)
    assert torch.equal(found["gradients"], logits) and torch.equal(found["losses"], expected["losses"])


def test_in_torch_operators():
    """What float64 and plain_torch() run."""
    logits, labels = torch.randn(5, 9).double(), torch.tensor([1, 3, 8, 9, -1])
    for options in OPTIONS.values():
        written, losses = logits.clone(), torch.empty(5).double()
        cross_entropy_(Inputs(written, losses, labels), options, True)
        truth = results(logits[:3], labels[:3], options, torch.float64)
        torch.testing.assert_close({"losses": losses[:3], "gradients": written[:3]}, truth)
        assert losses[3:].isnan().all() and written[3:].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(4)}, ValueError, r"logits must have 2 dimensions \(R, V\), got shape \(4,\)"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"V of at least 1, got \(2, 0\)"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int32)}, TypeError, "logits must be float32, float16 or bfloat16"),
        ({"logits": torch.zeros(4, 2).t()}, ValueError, "elements of a row of logits must be neighbours, got stride 2"),
        ({"losses": torch.zeros(2).half()}, TypeError, "losses must be float32, got float16"),
        ({"losses": torch.zeros(4)[::2]}, ValueError, "losses must be contiguous, got stride 2"),
        ({"labels": torch.zeros(2)}, TypeError, "labels must be int64, got float32"),
        (
            {"labels": torch.zeros(3, dtype=torch.long)},
            ValueError,
            r"labels must have shape \(R,\) = \(2,\), got \(3,\)",
        ),
    ],
)
def test_errors(change, error, message):
    good = {"logits": torch.zeros(2, 4), "losses": torch.zeros(2), "labels": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(error, match=f"cross_entropy: .*{message}"):
        cross_entropy_(Inputs(**{**good, **change}), OPTIONS["plain"], True)


@pytest.mark.skipif(TORCH < (2, 4), reason="torch.library.opcheck is new in torch 2.4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_opcheck(dtype, device):
    logits, losses = torch.randn(3, 20, device=device).to(dtype), torch.empty(3, device=device)
    inputs = Inputs(logits, losses, torch.tensor([2, -100, 19], device=device))
    torch.library.opcheck(torch.ops.mamba_ssm.cross_entropy.default, (*inputs, *OPTIONS["all"], True))


@pytest.mark.skipif(TORCH < (2, 4), reason="as of linear_cross_entropy")
def test_compiled_in_pieces(device, monkeypatch):
    """Logits are made and overwritten in a compiled program too."""
    monkeypatch.setattr(pieces, "_cut", lambda tokens, vocabulary: 4)
    labels = torch.tensor([1, 2, -100, 3, 0, 5, 4, 2, 1], device=device)

    def run(hidden, weight):
        return pieces.linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, z_loss=1e-3)

    leaves = [torch.randn(n, 6, device=device, requires_grad=True) for n in (9, 8)]
    expected, found = (
        (loss.detach(), *torch.autograd.grad(loss, leaves))
        for loss in (function(*leaves) for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_captured(cuda):
    """Forward and backward as one CUDA graph, with other labels at its replay."""
    hidden, weight = (torch.randn(n, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True) for n in (300, 1000))
    labels = torch.randint(1000, (300,), device=cuda)

    def run():
        loss = pieces.linear_cross_entropy(hidden, weight, labels)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    labels[::2] = -100
    graph.replay()
    torch.testing.assert_close(captured, run())


@pytest.mark.gpu
def test_more_than_31_bits_of_logits(cuda):
    """The last rows lie beyond 2^31 elements."""
    rows, vocabulary = 21_000, 102_400
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    logits = torch.zeros(rows, vocabulary, device=cuda, dtype=torch.bfloat16)
    labels = torch.full((rows,), -100, device=cuda)
    labels[-1] = vocabulary - 1
    losses = torch.empty(rows, device=cuda)
    cross_entropy_(Inputs(logits, losses, labels), OPTIONS["plain"], True)
    assert not losses[:-1].any() and not logits[:-1].any()
    torch.testing.assert_close(losses[-1].item(), math.log(vocabulary), rtol=1e-5, atol=0)
    assert logits[-1, -1] == torch.tensor(1 / vocabulary - 1).bfloat16().item()
    assert (logits[-1, :-1] == torch.tensor(1 / vocabulary).bfloat16().item()).all()
