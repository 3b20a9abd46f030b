"""Rows of different lengths in one batch: each is as if it were alone, in float64 and without padding."""

import copy
import functools

import pytest
import torch
import torch.utils.checkpoint

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.modules.bimamba2 import BiMamba2
from mamba_ssm.modules.hydra import Hydra
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mha import MHA
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch

WIDTH = 16
SIZES = {"d_state": 8, "headdim": 8}


def with_hook(block, name="conv1d"):
    """This submodule is called, not read."""
    getattr(block, name).register_forward_hook(lambda *call: None)
    return block


BLOCKS = {
    "mamba": lambda: Mamba(WIDTH, layer_idx=0, init_layer_scale=0.5),
    "mamba-bias": lambda: Mamba(WIDTH, bias=True, d_conv=3, layer_idx=0),
    "mamba-hook": lambda: with_hook(Mamba(WIDTH, layer_idx=0)),
    "mamba-v1": lambda: Mamba(WIDTH, bimamba_type="v1"),
    "mamba-v2": lambda: Mamba(WIDTH, bimamba_type="v2"),
    "mamba2": lambda: Mamba2(WIDTH, **SIZES, layer_idx=0),
    "mamba2-mlp-bias": lambda: Mamba2(WIDTH, **SIZES, d_ssm=16, bias=True, norm_before_gate=True, layer_idx=0),
    "mamba2-parts": lambda: Mamba2(WIDTH, **SIZES, use_mem_eff_path=False, dt_limit=(0.01, 0.2), layer_idx=0),
    "mamba2-hook": lambda: with_hook(Mamba2(WIDTH, **SIZES, rmsnorm=False, layer_idx=0)),
    "mamba2-simple": lambda: Mamba2Simple(WIDTH, **SIZES),
    "mamba3": lambda: Mamba3(WIDTH, **SIZES, layer_idx=0),
    "mamba3-mimo": lambda: Mamba3(WIDTH, **SIZES, is_mimo=True, mimo_rank=2, is_outproj_norm=True, layer_idx=0),
    "mamba3-hook": lambda: with_hook(Mamba3(WIDTH, **SIZES, layer_idx=0), "in_proj"),
    "bimamba2": lambda: BiMamba2(WIDTH, **SIZES),
    "bimamba2-gate": lambda: BiMamba2(WIDTH, **SIZES, combine="gate", shared_proj=False),
    "hydra": lambda: Hydra(WIDTH, **SIZES),
    "mha": lambda: MHA(WIDTH, 2, layer_idx=0),
    "mha-causal": lambda: MHA(WIDTH, 4, num_heads_kv=2, causal=True, rotary_emb_dim=2, d_conv=4, layer_idx=0),
}
CAUSAL = [name for name, make in BLOCKS.items() if getattr(make(), "layer_idx", None) == 0 and name != "mha"]
# (first real step, the one after the last): no padding, before, behind, both, one step, none
SPANS = [(0, 70), (69, 70), (9, 70), (0, 66), (3, 40), (0, 1), (30, 30)]
LENGTH = 70


def mask_of(spans, length, device, dtype=torch.int64):
    steps = torch.arange(length)
    return torch.stack([(steps >= start) & (steps < end) for start, end in spans]).to(device, dtype)


def alone(block, x, spans, dout):
    """Output and gradients of each row without its padding, in float64 on the CPU."""
    block, x = copy.deepcopy(block).cpu().double(), x.detach().cpu().double().requires_grad_()
    out = torch.zeros_like(x)
    with plain_torch():
        for row, (start, end) in enumerate(spans):
            if end > start:
                out[row, start:end] = block(x[row : row + 1, start:end])[0]
    out.backward(dout.cpu().double())
    return out.detach(), x.grad, [parameter.grad for parameter in block.parameters()]


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_as_if_alone(name, device):
    torch.manual_seed(1)
    block = BLOCKS[name]().to(device)
    x = torch.randn(len(SPANS), LENGTH, WIDTH, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    mask = mask_of(SPANS, LENGTH, device)
    with torch.no_grad():
        x[mask == 0] = float("nan")  # whatever is there, it must not matter
    out = block(x, attention_mask=mask)
    out.backward(dout)
    expected, dx, gradients = alone(block, x, SPANS, dout)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_device=False, check_dtype=False)
    close(out, expected)
    close(x.grad, dx)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        close(parameter.grad, gradient, atol=1e-4 * max(1.0, float(gradient.abs().max())))
    padding = mask == 0
    assert not out[padding].any()
    assert not x.grad[padding].any()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba3", "mha-causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(name, dtype, device):
    """A row is the same beside others as alone: the same kernels and rounding, but for how many rows a product has."""
    block = BLOCKS[name]().to(device, dtype)
    x = torch.randn(len(SPANS), LENGTH, WIDTH, device=device, dtype=dtype)
    out = block(x, attention_mask=mask_of(SPANS, LENGTH, device, torch.bool))
    for row, (start, end) in enumerate(SPANS[:-1]):
        expected = block(x[row : row + 1, start:end])[0]
        torch.testing.assert_close(out[row, start:end], expected, rtol=2e-2, atol=2e-2)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_states_are_those_after_the_last_real_step(name, device):
    """A prompt with padding, then steps, against each row alone."""
    torch.manual_seed(2)
    block, spans, length = BLOCKS[name]().to(device), [(5, 9), (0, 6), (2, 3), (0, 9), (1, 8)], 9
    x, more = torch.randn(5, length, WIDTH, device=device), torch.randn(5, 3, WIDTH, device=device)
    mask = mask_of(spans, length, device)
    params = InferenceParams(max_seqlen=20, max_batch_size=5, lengths_per_sample=mask.sum(1, dtype=torch.int32))
    with torch.no_grad():
        outs = [block(x, inference_params=params, attention_mask=mask)]
        for step in range(3):
            params.seqlen_offset = length + step
            outs.append(block(more[:, step : step + 1], inference_params=params))
            params.lengths_per_sample += 1
        for row, (start, end) in enumerate(spans):
            expected = block(torch.cat([x[row, start:end], more[row]])[None])[0]
            found = torch.cat([outs[0][row, start:end], *(out[row] for out in outs[1:])])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not outs[0][mask == 0].any()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba3"])
def test_a_row_of_padding_leaves_zero_states(name, device):
    block, params = BLOCKS[name]().to(device), InferenceParams(max_seqlen=20, max_batch_size=2)
    mask = mask_of([(0, 5), (5, 5)], 5, device)
    with torch.no_grad():
        block(torch.randn(2, 5, WIDTH, device=device), inference_params=params, attention_mask=mask)
    assert not any(state[1].any() for state in params.key_value_memory_dict[0])


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba3"])
def test_a_mask_of_ones(name):
    """On the CPU it is seen that nothing is padding, and nothing else is done than without a mask."""
    block, x = BLOCKS[name](), torch.randn(2, 9, WIDTH)
    assert torch.equal(block(x, attention_mask=torch.ones(2, 9, dtype=torch.bool)), block(x))
    assert torch.equal(block(x, attention_mask=torch.ones(2, 9, dtype=torch.int8)), block(x))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba3"])
def test_compile(name):
    """One graph, whatever the mask holds."""
    block, x = BLOCKS[name](), torch.randn(3, 20, WIDTH)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for spans in ([(3, 20), (0, 20), (0, 9)], [(0, 20)] * 3):
        mask = mask_of(spans, 20, "cpu")
        torch.testing.assert_close(compiled(x, attention_mask=mask), block(x, attention_mask=mask))


def test_mamba2_with_its_batch_and_length_in_one_dimension():
    block, x, mask = BLOCKS["mamba2"](), torch.randn(2, 9, WIDTH), mask_of([(2, 9), (0, 4)], 9, "cpu")
    flat = block(x.flatten(0, 1), seqlen=9, attention_mask=mask)
    assert torch.equal(flat, block(x, attention_mask=mask).flatten(0, 1))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 5), "of bool or integers, 1 for a real step and 0 for padding, got float32"),
        (torch.ones(2, 4, dtype=torch.int64), r"shape \(B, L\) = \(2, 5\) like the input, got \(2, 4\)"),
        (torch.ones(2, 1, 1, 5, dtype=torch.bool), r"shape \(B, L\) = \(2, 5\) .*, got \(2, 1, 1, 5\)"),
        (torch.ones(2, 5, dtype=torch.int64, device="meta"), "must be on cpu like the input, got meta"),
        (torch.tensor([[1] * 5, [1, 2, 1, 1, 1]]), "1 for a real step and 0 for padding, got 2"),
        (torch.tensor([[1] * 5, [0, -1, 1, 1, 1]]), "1 for a real step and 0 for padding, got -1"),
        (torch.tensor([[1] * 5, [0, 1, 1, 0, 1]]), "padding between them in row 1 at step 3: move it, or"),
        ([[1] * 5] * 2, "be a torch.Tensor, got list"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba2-simple", "mamba3", "bimamba2", "hydra", "mha"])
def test_wrong_masks(name, mask, message):
    with pytest.raises(
        (TypeError, ValueError), match=f"attention_mask .*{message}" if "list" not in message else message
    ):
        BLOCKS[name]()(torch.randn(2, 5, WIDTH), attention_mask=mask)


def test_what_a_mask_excludes():
    x, mask = torch.randn(2, 10, WIDTH), mask_of([(2, 10), (0, 10)], 10, "cpu")
    seq_idx = torch.zeros(2, 10, dtype=torch.int32)
    for name in ("mamba", "mamba2", "mamba2-simple", "mamba3", "bimamba2", "mha"):
        with pytest.raises(ValueError, match="attention_mask and seq_idx cannot be given together"):
            BLOCKS[name]()(x, attention_mask=mask, seq_idx=seq_idx)
    for name in ("mamba2", "mamba3", "bimamba2", "mha"):
        with pytest.raises(ValueError, match="attention_mask and cu_seqlens cannot be given together"):
            BLOCKS[name]()(x[:1], attention_mask=mask[:1], cu_seqlens=torch.tensor([0, 4, 10], dtype=torch.int32))
    for name in ("mamba", "mamba2", "mamba3", "mha"):
        with pytest.raises(ValueError, match="for the first call with inference_params, not for one that continues"):
            BLOCKS[name]()(x, attention_mask=mask, inference_params=InferenceParams(20, 2, seqlen_offset=3))
    with pytest.raises(ValueError, match="bimamba_type='v3' takes no attention_mask"):
        Mamba(WIDTH, bimamba_type="v3")(x, attention_mask=mask)
    with pytest.raises(ValueError, match="not supported with learnable_init_states"):
        Mamba2Simple(WIDTH, **SIZES, learnable_init_states=True)(x, attention_mask=mask)
    with pytest.raises(ValueError, match="MHA: attention_mask with inference_params needs lengths_per_sample"):
        BLOCKS["mha-causal"]()(x, attention_mask=mask, inference_params=InferenceParams(20, 2))


def test_where_values_are_not_looked_at_a_wrong_row_is_nan():
    """As on a GPU, where looking at them would be a synchronisation."""
    block, x = BLOCKS["mamba2"](), torch.randn(3, 6, WIDTH)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0], [0, 2, 1, 1, 1, 0]])
    out = torch.compile(block, fullgraph=True, backend="eager")(x, attention_mask=mask)
    assert out[0].isnan().all() and out[2].isnan().all()
    torch.testing.assert_close(out[1, 1:5], block(x[1:2, 1:5])[0])


def test_empty(device):
    block = BLOCKS["mamba2"]().to(device)
    for shape in ((0, 5), (2, 0)):
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        assert block(torch.randn(*shape, WIDTH, device=device), attention_mask=mask).shape == (*shape, WIDTH)


def test_checkpointing():
    """attention_mask goes through torch.utils.checkpoint as any tensor."""
    block, x, mask = (
        BLOCKS["mamba"](),
        torch.randn(2, 9, WIDTH, requires_grad=True),
        mask_of([(2, 9), (0, 4)], 9, "cpu"),
    )
    out = torch.utils.checkpoint.checkpoint(block, x, attention_mask=mask, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(block(x, attention_mask=mask).sum(), x)
    assert torch.equal(found, expected)
