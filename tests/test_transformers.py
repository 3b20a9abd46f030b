"""transformers takes this package's kernels unasked: the same logits, gradients and tokens as without it."""

import socket

import pytest
import torch
from benchmark.transformers_models import CONVOLUTIONS, OLDEST, TINY, model_pair

transformers = pytest.importorskip("transformers")
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
    pytest.skip(f"transformers {transformers.__version__} is older than 5.17", allow_module_level=True)
if not transformers.utils.is_torch_available():
    pytest.skip("this transformers does not take this torch", allow_module_level=True)

MAMBA1 = ("mamba", "falcon_mamba", "jamba", "zamba")
FUSED = {kind: "mamba_inner_fn" if kind in MAMBA1 else "mamba_split_conv1d_scan_combined" for kind in TINY}
SCAN = {kind: "selective_scan_fn" if kind in MAMBA1 else "mamba_chunk_scan_combined" for kind in TINY}
# Jamba norms B, C and dt by weights of its own between the pieces, Zamba has projections for each head: the fused
# function takes neither.
FUSED["jamba"] = FUSED["zamba"] = "selective_scan_fn"
PACKAGES = {"scan": ("mamba_ssm",), "scan and convolution": ("mamba_ssm", "causal_conv1d")}
with_and_without_convolution = pytest.mark.parametrize("packages", PACKAGES.values(), ids=PACKAGES)


def pair(kind, device, dtype=torch.float32, packages=PACKAGES["scan"]):
    return model_pair(kind, TINY[kind][1], device, dtype, packages=packages)


def tokens(device, seqlen=19, padded=True):
    """Two rows; the first starts with padding. Not for training, where transformers masks the padding after the
    convolution on its own path only.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (2, seqlen), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def results(model, inputs):
    """Logits of the tokens that are not padding, and the gradients of their loss."""
    out = model(**inputs, use_cache=False)
    wanted = inputs["attention_mask"].bool()
    loss = torch.nn.functional.cross_entropy(out.logits[wanted].float(), inputs["input_ids"][wanted])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return out.logits[wanted], [gradient for gradient in gradients if gradient is not None]


def assert_close(found, expected, tolerance):
    scale = max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


@with_and_without_convolution
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", TINY)
def test_logits_and_gradients(kind, training, packages, device):
    if kind == "falcon_mamba" and training:
        pytest.skip("transformers norms dt before its projection, but after it on the fused path of training")
    ours, theirs, calls = pair(kind, device, packages=packages)
    found, expected = (results(model.train(training), tokens(device, padded=not training)) for model in (ours, theirs))
    assert calls[FUSED[kind] if training else SCAN[kind]] > 0, calls
    if FUSED[kind] == SCAN[kind] or not training:
        assert (calls["causal_conv1d_fn"] > 0) == ("causal_conv1d" in packages), calls
    assert_close(found[0], expected[0], 1e-4)  # float32 sums in another order
    assert len(found[1]) == len(expected[1]) > 10
    for gradient, other in zip(found[1], expected[1], strict=True):
        assert_close(gradient, other, 1e-3)


@with_and_without_convolution
@pytest.mark.parametrize("kind", TINY)
def test_generated_tokens(kind, packages, device):
    ours, theirs, calls = pair(kind, device, packages=packages)
    prompt = tokens(device, 7)
    found, expected = (
        model.eval().generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
        for model in (ours, theirs)
    )
    assert found.shape == (2, 19) and torch.equal(found, expected)
    assert calls["selective_state_update"] > 0 and calls[SCAN[kind]] > 0, calls
    assert all((calls[name] > 0) == ("causal_conv1d" in packages) for name in CONVOLUTIONS), calls


@pytest.mark.parametrize("kind", TINY)
def test_no_warning_of_plain_torch_with_the_convolution(kind, monkeypatch):
    """What transformers says once where a package is missing."""
    said = []
    monkeypatch.setattr(transformers.integrations.hub_kernels.logger, "warning_once", said.append)
    for packages in PACKAGES.values():
        said.clear()
        ours, _, _ = pair(kind, "cpu", packages=packages)
        for training in (False, True):
            ours.train(training)(**tokens("cpu"), use_cache=False)
        ours.eval().generate(**tokens("cpu", 7), max_new_tokens=2, do_sample=False)
        warned = any("reference PyTorch implementation" in line for line in said)
        assert warned == ("causal_conv1d" not in packages), said


class NoNetwork(AssertionError):
    pass


@pytest.mark.skipif(
    not transformers.utils.is_kernels_available(),
    reason="needs the package kernels, of a version that this transformers takes",
)
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_beside_the_package_kernels(kind, monkeypatch):
    """Nothing is fetched from the hub unless use_kernels asks for it, and nothing for the CPU even then."""

    def lookup(host, *_, **__):
        raise NoNetwork(host)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    ours, theirs, calls = pair(kind, "cpu", packages=PACKAGES["scan and convolution"])
    expected, _ = results(theirs.eval(), tokens("cpu"))
    for use_kernels in (False, True):
        calls.clear()
        if use_kernels:
            ours.set_use_kernels(True)
        found, _ = results(ours.eval(), tokens("cpu"))
        assert calls[SCAN[kind]] > 0 and calls["causal_conv1d_fn"] > 0, calls
        assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("kind", TINY)
def test_beams_and_an_end_of_sequence(kind, device):
    """Beams reorder the states; rows that ended wait for the others."""
    ours, theirs, calls = pair(kind, device)
    beams = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": None}
    for options in (beams, {"eos_token_id": [3, 4, 5, 6, 7]}):
        found, expected = (
            model.eval().generate(**tokens(device, 7), max_new_tokens=8, do_sample=False, **options)
            for model in (ours, theirs)
        )
        assert torch.equal(found, expected)
    assert calls["selective_state_update"] > 0, calls


@pytest.mark.parametrize("kind", TINY)
def test_training_under_autocast_and_with_checkpointing(kind, device):
    """float32 weights, bfloat16 arithmetic; the same gradients when the layers are computed again in backward."""
    ours, theirs, calls = pair(kind, device)
    inputs = tokens(device, padded=False)
    losses, gradients = [], []
    for model in (ours, theirs, ours):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model.train()(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        ours.gradient_checkpointing_enable()
    assert calls[FUSED[kind]] > 0, calls
    if kind != "falcon_mamba":  # see test_logits_and_gradients
        assert_close(losses[0], losses[1], 0.03)  # rounded to 8 bits in other places
    assert_close(losses[2], losses[0], 1e-3)  # a GPU may add up in another order
    for again, first in zip(gradients[2], gradients[0], strict=True):
        assert (again is None) == (first is None)
        if again is not None:
            assert_close(again, first, 1e-2)


@pytest.mark.parametrize("kind", TINY)
def test_bfloat16(kind, device):
    ours, theirs, _ = pair(kind, device, torch.bfloat16)
    training = kind != "falcon_mamba"
    found, expected = (results(model.train(training), tokens(device, padded=not training)) for model in (ours, theirs))
    truth, _ = results(theirs.float(), tokens(device, padded=not training))
    # Each of some tens of intermediate results is rounded to 8 bits, by the two in other places: as far from the truth.
    ours_off, theirs_off = ((logits.float() - truth).square().mean().sqrt() for logits in (found[0], expected[0]))
    assert ours_off <= 2 * theirs_off, (ours_off, theirs_off)
    assert all(gradient.isfinite().all() for gradient in found[1])
    ours.eval().generate(**tokens(device, 7), max_new_tokens=3, do_sample=False)


@pytest.mark.filterwarnings("ignore:.*has no gradient")
@pytest.mark.parametrize("kind", TINY)
def test_a_step_with_grad_mode_on(kind, device):
    """The prompt's states may require gradients; what a step computes is detached, and its values are the same."""
    ours, theirs, calls = pair(kind, device)
    inputs, logits = tokens(device, 7, padded=False), []
    for model in (ours, theirs):
        out = model.eval()(**inputs, use_cache=True)
        cache = "cache_params" if "cache_params" in out else "past_key_values"
        logits.append(model(inputs["input_ids"][:, :1], use_cache=True, **{cache: out[cache]}).logits)
    assert calls, calls  # of the decode step, or of the scan: releases of transformers differ
    assert_close(logits[0], logits[1], 1e-4)
