"""float16 whose intermediate results are beyond its range, 65504: plain float16 overflows, the kernels do not."""

import functools

import pytest
import torch
from _helpers.cases import assert_close_to_truth, outputs_and_gradients

from mamba_ssm import Mamba, MambaLMHeadModel
from mamba_ssm._torch.private import SINCE_2_4
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.layer_norm import layer_norm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch

L, N = 256, 16


def half(tensor):
    """Rounded as a float16 result is, with an infinity beyond 65504."""
    return tensor.to(torch.float16).float()


def in_plain_torch(function, **arguments):
    with plain_torch():
        return function(**arguments)


def assert_as_true(function, tensors):
    """Results and gradients are finite, and as near to the truth as plain torch with float32 in between.

    The loss is small: gradients, such as that of C, a state times that of the output, must fit into float16 themselves.
    """

    def small(**given):
        return 1e-3 * function(**given)

    plain = functools.partial(in_plain_torch, small)
    found = outputs_and_gradients(small, tensors)
    assert all(value.isfinite().all() for value in found.values())
    truth = outputs_and_gradients(plain, tensors, torch.float64)
    assert_close_to_truth(found, outputs_and_gradients(plain, tensors), truth)


def growing():
    """(u, delta, A, B, C) of a scan whose states grow to 10**7, and its outputs to 10**3."""
    u, delta, B = 50 + torch.rand(2, 8, L), torch.full((2, 8, L), 4.0), torch.full((2, N, L), 50.0)
    return u, delta, torch.full((8, N), -1e-3), B, 1e-4 * torch.rand(2, N, L)


def test_states_of_a_scan(device):
    u, delta, A, B, C = growing()
    state, outputs = torch.zeros(2, 8, N), []
    for t in range(L):
        added = half(half(delta[..., t, None] * u[..., t, None]) * B[:, None, :, t])
        state = half(half(torch.exp(delta[..., t, None] * A) * state) + added)
        outputs.append(half((state * C[:, None, :, t]).sum(-1)))
    assert not torch.stack(outputs).isfinite().all()

    tensors = {"u": u.half(), "delta": delta.half(), "A": A, "B": B.half(), "C": C.half()}
    assert_as_true(selective_scan_fn, {name: value.to(device) for name, value in tensors.items()})


def test_states_of_mamba2(device, kernels):
    """The CUDA kernels multiply by states in the dtype of x: there bfloat16 has the range."""
    u, _, _, B, C = growing()
    dtype = torch.float16 if kernels == "cpu" else torch.bfloat16
    tensors = {
        "x": u.view(2, 2, 4, L).permute(0, 3, 1, 2).to(dtype),
        "dt": torch.full((2, L, 2), 4.0).to(dtype),
        "A": torch.full((2,), -1e-3),
        "B": B.mT[:, :, None].to(dtype),
        "C": C.mT[:, :, None].to(dtype),
    }
    assert_as_true(
        functools.partial(mamba_chunk_scan_combined, chunk_size=64),
        {name: value.to(device) for name, value in tensors.items()},
    )


@pytest.mark.parametrize("dt", [30.0, 3000.0])
def test_large_steps(dt, device):
    """Sums of dt A, whose differences are the exponents of decays: infinity minus infinity is NaN."""
    sums, A = [torch.zeros(())], -50.0
    for _ in range(64):
        sums.append(half(sums[-1] + half(torch.tensor(dt * A))))
    assert torch.exp(sums[-1] - sums[-2]).isnan()

    x, B, C = torch.randn(2, L, 2, 4), torch.randn(2, L, 1, N), torch.randn(2, L, 1, N)
    tensors = {"x": x.half(), "dt": torch.full((2, L, 2), dt).half(), "A": torch.full((2,), A)}
    tensors |= {"B": (B / dt).half(), "C": C.half()}
    tensors = {name: value.to(device) for name, value in tensors.items()}
    assert_as_true(functools.partial(mamba_chunk_scan_combined, chunk_size=64), tensors)
    scan = {
        "u": tensors["x"][..., 0].mT,
        "delta": tensors["dt"].mT,
        "A": tensors["A"][:, None].expand(2, N).contiguous(),
    }
    scan |= {name: tensors[name][:, :, 0].mT for name in "BC"}
    assert_as_true(selective_scan_fn, {name: value.contiguous() for name, value in scan.items()})


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_squares_of_a_norm(is_rms_norm, device):
    x = (20000 * torch.randn(5, 64)).half().clamp(-65000, 65000)
    assert not half(x.float().square()).isfinite().all()
    tensors = {"x": x.to(device), "weight": torch.randn(64, device=device), "bias": torch.randn(64, device=device)}
    assert_as_true(functools.partial(layer_norm_fn, is_rms_norm=is_rms_norm), tensors)


def test_a_float32_state_of_a_decode_step(device):
    """A state has the dtype that its owner gave it: in float16 it overflows, as any such tensor would."""
    u, delta, A, B, C = (tensor.to(device) for tensor in growing())
    outs = {}
    for dtype in (torch.float16, torch.float32):
        state = torch.zeros(2, 8, N, device=device, dtype=dtype)
        for t in range(16):
            step = (tensor[..., t].half() for tensor in (u, delta))
            outs[dtype] = selective_state_update(state, *step, A, B[..., t].half(), C[..., t].half())
        assert state.isfinite().all() == (dtype == torch.float32)
    assert not outs[torch.float16].isfinite().all() and outs[torch.float32].dtype == torch.float16
    truth = selective_scan_fn(*(tensor[..., :16].contiguous() for tensor in (u, delta)), A, B[..., :16], C[..., :16])
    torch.testing.assert_close(outs[torch.float32].float(), truth[..., -1], rtol=2e-3, atol=0)  # rounded to 11 bits


@pytest.mark.skipif(not SINCE_2_4, reason="the oldest torch has not all of a block's products in float16 on the CPU")
def test_a_block_of_float16_with_float32_states(device):
    """As docs/models.md says: the states that a model in float16 decodes with may be float32."""
    block = Mamba(d_model=16, layer_idx=0, device=device).half()
    x = torch.randn(2, 9, 16, device=device).half()
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    states = params.key_value_memory_dict[0] = block.allocate_inference_cache(2, 9, dtype=torch.float32)
    outs = []
    with torch.no_grad():
        for part in (x[:, :6], *x[:, 6:].split(1, dim=1)):
            outs.append(block(part, inference_params=params))
            params.seqlen_offset += part.shape[1]
        expected = block(x)
    assert [state.dtype for state in states] == [torch.float32] * 2 and states[1].ne(0).any()
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-2, atol=1e-3)  # rounded to 11 bits in between


@pytest.mark.skipif(not SINCE_2_4, reason="autocast in float16 on the CPU, and GradScaler there, came with torch 2.4")
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_training_with_a_loss_scale_that_is_too_large(layer):
    """Gradients overflow and are seen as infinite, those steps are left out, and the scale falls until they fit."""
    sizes = {} if layer == "Mamba1" else {"headdim": 8, "d_state": 16}
    model = MambaLMHeadModel(MambaConfig(32, n_layer=1, vocab_size=32, ssm_cfg={"layer": layer, **sizes}))
    tokens, scaler = torch.randint(32, (2, 16)), torch.amp.GradScaler("cpu", init_scale=2.0**28)
    optimizer, losses, left_out = torch.optim.AdamW(model.parameters(), 1e-2), [], 0
    for _ in range(24):
        with torch.autocast("cpu", torch.float16):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        left_out += scaler.get_scale() < scale
    assert 0 < left_out < 20 and losses[-1] < losses[0] - 0.1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
