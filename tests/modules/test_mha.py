"""Attention of hybrid models against a position-by-position float64 reference; cache, packed sequences, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import dtype_id

from mamba_ssm.modules.mha import MHA, _update_kv_cache
from mamba_ssm.utils.generation import InferenceParams

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "num_heads_kv": 2, "head_dim": 10},
    {"causal": True, "num_heads_kv": 1, "rotary_emb_dim": 6, "qkv_proj_bias": False, "out_proj_bias": False},
    {"causal": True, "rotary_emb_dim": 4, "rotary_emb_interleaved": True, "rotary_emb_base": 100.0},
    {"causal": True, "d_conv": 4, "mlp_dim": 30, "num_heads_kv": 2, "rotary_emb_dim": 6, "softmax_scale": 0.3},
    {"rotary_emb_dim": 2, "d_conv": 2, "mlp_dim": 300},
]


def ids(options):
    return "-".join(f"{name}={value}" for name, value in options.items()) or "plain"


def make(options, **kwargs):
    return MHA(24, num_heads=4, layer_idx=0, **options, **kwargs)


def rotated(vector, position, dim, base, interleaved):
    """One head's vector turned at one position, pair by pair as RoFormer writes it."""
    out = vector.clone()
    for i in range(dim // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * base ** (-2 * i / dim)
        out[first] = vector[first] * math.cos(angle) - vector[second] * math.sin(angle)
        out[second] = vector[first] * math.sin(angle) + vector[second] * math.cos(angle)
    return out


def reference(module, x):
    """x (L, embed_dim) of one sequence in float64, with a loop over heads and positions."""
    weight = {name: tensor.double() for name, tensor in module.named_parameters()}
    projected = F.linear(x, weight["in_proj.weight"], weight.get("in_proj.bias"))
    heads, kv_heads, dim = module.num_heads, module.num_heads_kv, module.head_dim
    channels = (heads + 2 * kv_heads) * dim
    qkv, mlp = projected[:, :channels], projected[:, channels:]
    if module.d_conv:
        padded = F.pad(qkv.T[None], (module.d_conv - 1, 0))
        qkv = F.conv1d(padded, weight["conv1d.weight"], weight["conv1d.bias"], groups=channels)[0].T
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in (q, k, v))
    scale = module.softmax_scale or 1 / math.sqrt(dim)
    turn = module.rotary_emb_dim, module.rotary_emb_base, module.rotary_emb_interleaved
    rows = []
    for t in range(len(x)):
        row = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            query = rotated(q[t, head], t, *turn)
            seen = range(t + 1 if module.causal else len(x))
            scores = torch.stack([query @ rotated(k[s, group], s, *turn) * scale for s in seen])
            row.append(scores.softmax(0) @ v[: len(seen), group])
        rows.append(torch.cat(row))
    out = torch.stack(rows)
    if module.mlp_dim:
        up, gate = mlp.chunk(2, dim=-1)
        out = torch.cat([out, up * F.silu(gate)], dim=-1)
    return F.linear(out, weight["out_proj.weight"], weight.get("out_proj.bias"))


def test_state_dict_has_upstreams_names_and_shapes():
    module = MHA(64, num_heads=4, num_heads_kv=2, head_dim=8, mlp_dim=100, d_conv=3, rotary_emb_dim=8)
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == {
        "in_proj.weight": ((4 + 2 + 2) * 8 + 256, 64),  # mlp_dim rounded up to 256
        "in_proj.bias": ((4 + 2 + 2) * 8 + 256,),
        "conv1d.weight": (64, 1, 3),
        "conv1d.bias": (64,),
        "out_proj.weight": (64, 32 + 128),
        "out_proj.bias": (64,),
    }


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_matches_the_reference(options, device):
    module = make(options).to(device)
    x = torch.randn(2, 7, 24, device=device, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    expected = torch.stack([reference(module, row) for row in wide])
    out = module(x)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)  # float32 sums of tens of terms
    leaves = list(module.parameters())
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, *leaves], weights)
    wanted = torch.autograd.grad(expected, [wide, *leaves], weights.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_low_precision(dtype, device):
    module = make(OPTIONS[5]).to(device)
    x = torch.randn(2, 33, 24, device=device)
    expected = module(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(module(x).float(), expected, rtol=0.05, atol=0.03)
    out = module.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("shape", [(0, 3, 24), (2, 0, 24), (2, 1, 24)], ids=str)
def test_short_input(shape, device):
    module = make(OPTIONS[5]).to(device)
    out = module(torch.randn(shape, device=device))
    assert out.shape == shape and out.isfinite().all()


@pytest.mark.parametrize("tensor_positions", [False, True], ids=["offset", "lengths"])
@pytest.mark.parametrize("options", OPTIONS[1:6], ids=ids)
def test_prefill_then_steps_equal_one_forward(options, tensor_positions, device):
    module = make(options).to(device)
    x = torch.randn(3, 12, 24, device=device)
    params = InferenceParams(max_seqlen=15, max_batch_size=3)
    if tensor_positions:
        params.lengths_per_sample = torch.zeros(3, dtype=torch.int32, device=device)
        # what an earlier call has left behind, beyond what is seen, must not matter
        kv_cache, conv_state = module.allocate_inference_cache(3, 15)
        params.key_value_memory_dict[0] = kv_cache.fill_(torch.nan), conv_state
    with torch.no_grad():
        parts = [module(x[:, :5], inference_params=params)]
        for t in range(5, 12):
            params.seqlen_offset = t
            if tensor_positions:
                params.lengths_per_sample.fill_(t)
            parts.append(module(x[:, t : t + 1], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, dim=1), module(x), rtol=1e-4, atol=1e-5)


def test_prefill_in_pieces(device):
    module = make({"causal": True, "rotary_emb_dim": 6}).to(device)
    x = torch.randn(2, 12, 24, device=device)
    params = InferenceParams(max_seqlen=12, max_batch_size=2)
    with torch.no_grad():
        parts = []
        for start, end in ((0, 4), (4, 5), (5, 12)):
            params.seqlen_offset = start
            parts.append(module(x[:, start:end], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, dim=1), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_packed_sequences_do_not_see_each_other(options, device):
    module = make(options).to(device)
    x = torch.randn(1, 20, 24, device=device)
    apart = torch.cat([module(x[:, a:b]) for a, b in ((0, 7), (7, 8), (8, 20))], dim=1)
    seq_idx = torch.tensor([0] * 7 + [1] + [2] * 12, dtype=torch.int32, device=device)[None]
    torch.testing.assert_close(module(x, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)
    cu_seqlens = torch.tensor([0, 7, 8, 20], dtype=torch.int32, device=device)
    torch.testing.assert_close(module(x, cu_seqlens=cu_seqlens), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS[1:6], ids=ids)
def test_packed_prefill_then_steps(options, device):
    """Sequences of different lengths fill one cache each, then all step together."""
    module = make(options).to(device)
    lengths, new = [5, 1, 9], 3
    sequences = [torch.randn(1, length + new, 24, device=device) for length in lengths]
    expected = torch.cat([module(sequence)[:, -new:] for sequence in sequences])
    params = InferenceParams(max_seqlen=12, max_batch_size=3)
    cu_seqlens = torch.tensor([0, 5, 6, 15], dtype=torch.int32, device=device)
    with torch.no_grad():
        prompts = [sequence[:, :length] for sequence, length in zip(sequences, lengths, strict=True)]
        module(torch.cat(prompts, dim=1), inference_params=params, cu_seqlens=cu_seqlens)
        params.lengths_per_sample = cu_seqlens.diff()
        found = []
        for t in range(new):
            params.seqlen_offset += 1  # any positive value: the positions are lengths_per_sample
            tokens = [
                sequence[:, length + t : length + t + 1] for sequence, length in zip(sequences, lengths, strict=True)
            ]
            found.append(module(torch.cat(tokens), inference_params=params))
            params.lengths_per_sample = params.lengths_per_sample + 1
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"num_heads": 4, "num_heads_kv": 0}, "num_heads_kv must be a positive integer, got 0"),
        ({"num_heads": 5}, r"num_heads \(5\) must divide embed_dim \(24\)"),
        ({"num_heads": 4, "num_heads_kv": 3}, r"num_heads_kv \(3\) must divide num_heads \(4\)"),
        ({"num_heads": 4, "d_conv": 5}, "must be an integer from 2 to 4, got 5"),
        ({"num_heads": 4, "rotary_emb_dim": 3}, r"even and at most head_dim \(6\), got 3"),
        ({"num_heads": 4, "rotary_emb_dim": 8}, r"even and at most head_dim \(6\), got 8"),
    ],
    ids=str,
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        MHA(24, **options)


def test_wrong_calls():
    module = make({"causal": True, "d_conv": 2})
    x = torch.randn(2, 5, 24)
    with pytest.raises(ValueError, match="layer_idx must be given"):
        MHA(24, 4)(x, inference_params=InferenceParams(8, 2))
    with pytest.raises(ValueError, match=r"5 tokens do not fit inference_params.max_seqlen = 4"):
        module(x, inference_params=InferenceParams(4, 2))
    params = InferenceParams(8, 2)
    module(x, inference_params=params)
    with pytest.raises(ValueError, match="a batch of 2, got a batch of 1"):
        module(x[:1], inference_params=params)
    params.seqlen_offset = 5
    params.lengths_per_sample = torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="a step takes one token, got 3"):
        module(x[:, :3], inference_params=params)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="not for a step"):
        module(x[:1], inference_params=params, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="packed in a batch of 1, got a batch of 2"):
        module(x, cu_seqlens=cu_seqlens)
    for bounds in ([0, 6], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to at most the 5 steps of x, got \["):
            module(x[:1], inference_params=InferenceParams(8, 1), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"4 tokens do not fit inference_params.max_seqlen = 3"):
        bounds = torch.tensor([0, 1, 5], dtype=torch.int32)
        module(x[:1], inference_params=InferenceParams(3, 2), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="given by cu_seqlens"):
        module(x, inference_params=InferenceParams(8, 2), seq_idx=torch.zeros(2, 5, dtype=torch.int32))


def test_compile(device):
    module = make(OPTIONS[5]).to(device)
    x = torch.randn(2, 9, 24, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[3], OPTIONS[4], {"num_heads_kv": 2}], ids=ids)
@pytest.mark.parametrize("per_row", [False, True])
def test_the_parts_of_upstreams_forward(options, per_row, device):
    """A prompt, then two steps, of projections that the caller makes: as forward attends."""
    torch.manual_seed(0)
    module = make(options, device=device)
    x = torch.randn(2, 7, 24, device=device)
    lengths = torch.tensor([5, 5], dtype=torch.int32, device=device)
    mine, theirs = (
        InferenceParams(max_seqlen=8, max_batch_size=2, lengths_per_sample=lengths.clone() if per_row else None)
        for _ in range(2)
    )
    mine.key_value_memory_dict[0] = module.allocate_inference_cache(3, 8)  # more rows than are used
    for start, end in ((0, 5), (5, 6), (6, 7)):
        mine.seqlen_offset = theirs.seqlen_offset = start
        if per_row:
            mine.lengths_per_sample.fill_(start)
            theirs.lengths_per_sample.fill_(start)
        q, k, v = module.in_proj(x[:, start:end]).split([module.q_dim, module.kv_dim, module.kv_dim], dim=-1)
        q, kv = q.unflatten(-1, (4, -1)), torch.stack([k, v], 2).unflatten(-1, (-1, module.head_dim))
        attend = module._apply_rotary_update_kvcache_attention
        if not module.rotary_emb_dim:
            attend = module._update_kvcache_attention
        found = module.out_proj(attend(q, kv, mine).flatten(-2))
        torch.testing.assert_close(found, module(x[:, start:end], inference_params=theirs))
    torch.testing.assert_close(mine.key_value_memory_dict[0][0][:2, :7], theirs.key_value_memory_dict[0][0][:, :7])


def test_update_kv_cache(device):
    module = make({"num_heads_kv": 2}, device=device)
    params = InferenceParams(max_seqlen=6, max_batch_size=3, seqlen_offset=2, batch_size_offset=1)
    kv = torch.randn(2, 3, 2, 2, 6, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="no cache of layer 0: put allocate_inference_cache's there"):
        module._update_kv_cache(kv, params)
    cache, _ = params.key_value_memory_dict[0] = module.allocate_inference_cache(3, 6)
    seen = module._update_kv_cache(kv, params)
    assert seen.shape == (2, 5, 2, 2, 6) and seen.data_ptr() == cache[1].data_ptr() and not seen.requires_grad
    assert torch.equal(cache[1:, 2:5], kv.detach()) and cache[0].eq(0).all() and cache[:, 5].eq(0).all()
    assert torch.equal(_update_kv_cache(kv, params, 0), seen)
    params.seqlen_offset = 4
    with pytest.raises(ValueError, match="holds 3 rows of 6 tokens, got 3 rows of 7"):
        _update_kv_cache(kv, params, 0)
    params.seqlen_offset, params.lengths_per_sample = 1, torch.ones(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"kv must have shape \(B, L, 2, 2, 6\), got \(2, 3, 2, 4, 3\)"):
        module._update_kv_cache(kv.view(2, 3, 2, 4, 3), params)
    with pytest.raises(ValueError, match=r"kv must have shape \(B, L, 2, 2, 6\), got \(2, 3, 4, 6\)"):
        module._update_kvcache_attention(kv[:, :, 0], kv.flatten(2, 3), params)
    with pytest.raises(ValueError, match="a step takes one token, got 3"):
        module._update_kvcache_attention(torch.randn(2, 3, 4, 6, device=device), kv, params)
    with pytest.raises(ValueError, match="layer_idx must be given"):
        MHA(24, num_heads=4)._update_kv_cache(kv, params)
