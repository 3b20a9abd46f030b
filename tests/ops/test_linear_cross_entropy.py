"""The head's product and its cross entropy in pieces, against torch's own on all logits at once in float64."""

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id

from mamba_ssm.ops import linear_cross_entropy as module
from mamba_ssm.ops.cross_entropy import cross_entropy_
from mamba_ssm.ops.linear_cross_entropy import linear_cross_entropy

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "z": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "ignore_index": 3, "reduction": "sum"},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    return "cpu" if request.param == "cpu" else request.getfixturevalue("cuda")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "_cut", lambda tokens, vocabulary: 7)


def problem(shape, dtype, device, width=24, vocabulary=50):
    hidden = torch.randn(*shape, width).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) / 3).to(device, dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape, device=device)
    return hidden, weight, labels


def at_once(hidden, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    logits = (hidden @ weight.T).flatten(0, -2)
    logits, labels = logits if logits.dtype == torch.float64 else logits.float(), labels.flatten()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = F.cross_entropy(logits, labels, **options)
    squares = logits.logsumexp(1).square()[labels != ignore_index]
    return loss + z_loss * (squares.mean() if reduction == "mean" else squares.sum())


def results(function, hidden, weight, labels, options, dtype=None):
    hidden, weight = (tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in (hidden, weight))
    loss = function(hidden, weight, labels, **options)
    (2.5 * loss).backward()
    return {"loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(3, 11), (1, 7), (40,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, shape, dtype, where, small_pieces):
    options = OPTIONS[options]
    hidden, weight, labels = problem(shape, dtype, where)
    labels.view(-1)[::4] = options.get("ignore_index", -100)
    found = results(linear_cross_entropy, hidden, weight, labels, options)
    plain = results(at_once, hidden, weight, labels, options)
    truth = results(at_once, hidden, weight, labels, options, torch.float64)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: tensor.dtype for n, tensor in plain.items()}
    assert_close_to_truth(found, plain, truth)


def test_float64_gradients(small_pieces):
    hidden, weight, labels = problem((3, 5), torch.float64, "cpu", width=4, vocabulary=9)
    labels[0, 2] = -100

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, z_loss=1e-2)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_the_logits_of_all_tokens_never_exist(small_pieces):
    hidden, weight, labels = problem((30, 10), torch.float32, "cpu")
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            out = function(*arguments, **(options or {}))
            largest.append(max([t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)] or [0]))
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, labels).backward()
    assert max(largest) == hidden.numel() < labels.numel() * weight.shape[0]


@pytest.mark.parametrize("frozen", ["hidden_states", "weight", "both"])
def test_gradients_that_are_not_wanted(frozen):
    hidden, weight, labels = problem((2, 9), torch.float32, "cpu")
    expected = results(linear_cross_entropy, hidden, weight, labels, {})
    hidden.requires_grad_(frozen == "weight"), weight.requires_grad_(frozen == "hidden_states")
    loss = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(loss, expected["loss"]) and loss.requires_grad == (frozen != "both")
    if frozen != "both":
        leaf, name = (hidden, "dhidden") if frozen == "weight" else (weight, "dweight")
        torch.testing.assert_close(torch.autograd.grad(2.5 * loss, leaf)[0], expected[name])


def test_no_label_counts():
    hidden, weight, labels = problem((2, 3), torch.float32, "cpu")
    labels.fill_(-100)
    assert linear_cross_entropy(hidden, weight, labels).isnan()  # as torch's
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    assert total == 0
    assert not torch.autograd.grad(total, hidden)[0].any()
    assert linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum") == 0


def test_scaled_float16_gradients_keep_small_probabilities():
    """Divided by the count before it was scaled, a probability of 1e-6 would be zero in float16."""
    hidden, weight, labels = problem((4000,), torch.float16, "cpu", width=8, vocabulary=300)
    found = results(linear_cross_entropy, hidden, weight, labels, {})
    truth = results(at_once, hidden, weight, labels, {}, torch.float64)
    error = (found["dweight"].double() - truth["dweight"]).abs().max() / truth["dweight"].abs().max()
    assert error < 2e-3  # float16 has 2^-11 = 5e-4


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float16, 300_000), (torch.float32, 10_000)], ids=str)
def test_many_tokens_of_a_small_vocabulary(dtype, tokens):
    """Half of all labels are one word: in float16 the sum of their gradients would be infinite."""
    hidden, weight = (1 + torch.randn(tokens, 8) / 2).to(dtype), (torch.randn(16, 8) / 3).to(dtype)
    labels = torch.randint(16, (tokens,))
    labels[::2] = 3
    found = results(linear_cross_entropy, hidden, weight, labels, {})
    truth = results(at_once, hidden, weight, labels, {}, torch.float64)
    torch.testing.assert_close(found["dweight"].double(), truth["dweight"], rtol=2e-2, atol=2e-3)


def test_a_loss_scale_beyond_float16(where):
    hidden, weight, labels = problem((2, 3), torch.float16, where)
    scale = torch.tensor(65536.0, device=where)
    loss = linear_cross_entropy(hidden, weight, labels, reduction="sum") * scale
    drows, dweight = torch.autograd.grad(loss / 64, (hidden, weight))
    assert drows.isfinite().all() and dweight.isfinite().all()
    (drows,) = torch.autograd.grad(linear_cross_entropy(hidden, weight * 0, labels, reduction="sum") * scale, hidden)
    assert not drows.any()  # zero times the scale, not NaN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_a_probability_near_one_keeps_its_gradient(dtype, where):
    hidden, weight = torch.eye(2).to(where, dtype), torch.diag(torch.tensor([7.0, 7.0])).to(where, dtype)
    labels = torch.arange(2, device=where)
    found = results(linear_cross_entropy, hidden, weight, labels, {})  # probabilities of 0.9991
    truth = results(at_once, hidden, weight, labels, {}, torch.float64)
    torch.testing.assert_close(found["dhidden"].double(), truth["dhidden"], rtol=1e-2, atol=0)


def test_what_is_ignored_may_be_nan(small_pieces):
    hidden, weight, labels = problem((2, 9), torch.float32, "cpu")
    labels[0, 3:5] = -100
    expected = results(linear_cross_entropy, hidden, weight, labels, {})
    with torch.no_grad():
        hidden[0, 3:5] = torch.nan
    found = results(linear_cross_entropy, hidden, weight, labels, {})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_nothing_to_predict_changes_no_weight(dtype, where):
    """The mean of nothing is NaN, but as with torch a step of training leaves a model as it was."""
    hidden, weight, labels = problem((2, 9), dtype, where)
    for function in linear_cross_entropy, at_once:
        found = results(function, hidden, weight, torch.full_like(labels, -100), {})
        assert found["loss"].isnan() and not found["dhidden"].any() and not found["dweight"].any()


@pytest.mark.parametrize("vocabulary", [16, 50280, 256000])
@pytest.mark.parametrize("tokens", [0, 1, 100, 2048, 16384, 300_000])
def test_what_a_piece_holds(tokens, vocabulary):
    """Whole tiles, of at most half of a small batch's logits and of 400 MiB of bfloat16 ones, or a single tile."""
    piece = module._cut(tokens, vocabulary)
    assert piece >= 1 and (piece <= 128 or piece % 128 == 0)
    assert piece <= 128 or 2 * piece * vocabulary <= 400 * 2**20 + 2 * 128 * vocabulary
    if tokens * vocabulary > 32 * 2**20:
        assert piece <= max(128, tokens // 2 + 128)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_are_formed(context, monkeypatch):
    formed = []

    def noted(inputs, options, want_gradient, part):
        formed.append(want_gradient)
        return cross_entropy_(inputs, options, want_gradient, part)

    monkeypatch.setattr(module, "cross_entropy_", noted)
    with context():
        linear_cross_entropy(*problem((2, 3), torch.float32, "cpu"))
    assert formed == [False]


def test_autocast(where):
    hidden, weight, labels = problem((2, 9), torch.float32, where)
    with torch.autocast(where, torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels)
    narrow = [tensor.detach().bfloat16() for tensor in (hidden, weight)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, linear_cross_entropy(*narrow, labels))
    assert torch.autograd.grad(found, weight)[0].dtype == torch.float32


@pytest.mark.skipif(TORCH < (2, 4), reason="torch 2.2's compiler follows few autograd.Functions")
def test_compiled(needs_inductor):
    hidden, weight, labels = problem((2, 9), torch.float32, "cpu")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    expected, found = (results(function, hidden, weight, labels, {}) for function in (linear_cross_entropy, compiled))
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_refused():
    hidden, weight, labels = problem((2, 3), torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="linear_cross_entropy cannot be differentiated: second derivatives"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": torch.zeros(2, 4, dtype=torch.long)}, ValueError, r"labels must be \(2, 3\) as .* got \(2, 4\)"),
        ({"labels": torch.zeros(2, 3)}, TypeError, "labels must be int64, got torch.float32"),
        ({"labels": torch.full((2, 3), 50)}, ValueError, r"labels must lie in 0..49, or ignore_index = -100, got 50"),
        ({"labels": torch.full((2, 3), -1)}, ValueError, r"got -1"),
        ({"labels": [1]}, TypeError, "labels must be a torch.Tensor, got list"),
        ({"weight": torch.zeros(50, 23)}, ValueError, r"hidden_states must be \(..., E\) with weight's E = 23"),
        ({"weight": torch.zeros(0, 24)}, ValueError, "V of at least 1"),
        ({"weight": torch.zeros(50, 24).half()}, TypeError, "weight must have hidden_states' dtype, torch.float32"),
        ({"weight": torch.zeros(50, 24, dtype=torch.long)}, TypeError, "must be floats"),
        ({"weight": torch.zeros(50, 24, device="meta")}, ValueError, "on one device, got cpu, meta and cpu"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ({"z_loss": float("nan")}, ValueError, "z_loss must be finite and not negative, got nan"),
        ({"reduction": "none"}, ValueError, "reduction must be 'mean' or 'sum', got 'none'"),
    ],
)
def test_errors(change, error, message):
    hidden, weight, labels = problem((2, 3), torch.float32, "cpu")
    arguments = {"hidden_states": hidden, "weight": weight, "labels": labels, **change}
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        linear_cross_entropy(**arguments)


@pytest.mark.gpu
def test_a_wrong_label_on_a_gpu_makes_the_loss_nan(cuda):
    hidden, weight, labels = problem((2, 3), torch.float32, cuda)
    labels[1, 1] = 50
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.isnan() and all(grad.isnan().any() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_the_same_where_values_are_not_at_hand(monkeypatch):
    monkeypatch.setattr(module, "values_at_hand", lambda tensor: False)
    test_a_wrong_label_on_a_gpu_makes_the_loss_nan("cpu")


def test_batched_gradients(device):
    hidden, weight = torch.randn(5, 8, device=device, requires_grad=True), torch.randn(7, 8, device=device)
    loss = linear_cross_entropy(hidden, weight, torch.arange(5, device=device))
    scales = torch.tensor([1.0, -2.0], device=device)
    (found,) = torch.autograd.grad(loss, hidden, scales, retain_graph=True, is_grads_batched=True)
    (one,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, scales[:, None, None] * one)
