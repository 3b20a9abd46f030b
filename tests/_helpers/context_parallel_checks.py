"""What each rank of tests/distributed/test_context_parallel.py runs: a part of a sequence against all of it, which
every rank computes too.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from _helpers.ranks import leaf, same
from mamba_ssm import Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm.distributed.context_parallel import context_parallel, split_sequence
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.bimamba2 import BiMamba2
from mamba_ssm.modules.mamba2_simple import Mamba2Simple

BLOCKS = {
    "mamba": lambda: Mamba(24, d_state=5),
    "mamba_no_biases": lambda: Mamba(24, d_state=16, d_conv=2, conv_bias=False, use_fast_path=False),
    "mamba_in_proj_with_bias": lambda: Mamba(24, bias=True, d_conv=3),
    "mamba2": lambda: Mamba2(24, d_state=16, headdim=8),
    "mamba2_groups": lambda: Mamba2(32, d_state=8, headdim=4, ngroups=2, d_ssm=32, D_has_hdim=True, bias=True),
    "mamba2_no_norm": lambda: Mamba2(24, d_state=3, headdim=12, rmsnorm=False, dt_limit=(0.01, 0.1), d_conv=2),
    "mamba3": lambda: Mamba3(24, d_state=16, headdim=8),
    "mamba3_mimo": lambda: Mamba3(24, d_state=16, headdim=8, is_mimo=True, mimo_rank=2, is_outproj_norm=True),
}


def bounds(lengths):
    """The places where the parts of the ranks begin and end; lengths are repeated for further ranks."""
    world = dist.get_world_size()
    ends = torch.tensor([lengths[rank % len(lengths)] for rank in range(world)]).cumsum(0).tolist()
    return [0, *ends]


def mine(tensor, lengths):
    """This rank's part along the second dimension."""
    edges, rank = bounds(lengths), dist.get_rank()
    return tensor[:, edges[rank] : edges[rank + 1]]


def blocks(name, lengths, dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    whole = BLOCKS[name]().to(dtype)
    with torch.no_grad():  # decays that reach over several parts, and D that matters
        for parameter in whole.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * same(*parameter.shape, seed=5).to(parameter.dtype))
    block = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
    length = bounds(lengths)[-1]
    whole_x, dout = leaf(same(batch, length, whole.d_model).to(dtype)), same(batch, length, whole.d_model, seed=1)
    dout = dout.to(dtype)
    whole_out = whole(whole_x)
    whole_out.backward(dout)
    x = leaf(mine(whole_x, lengths))
    out = block(x)
    out.backward(mine(dout, lengths))
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(out, mine(whole_out, lengths), **close)
    torch.testing.assert_close(x.grad, mine(whole_x.grad, lengths), **close)
    for (key, parameter), total in zip(block.named_parameters(), whole.parameters(), strict=True):
        summed, expected = parameter.grad.float(), total.grad.float()
        dist.all_reduce(summed)
        scale = float(expected.abs().max()) + 1e-3  # sums over all steps: their rounding goes with their size
        torch.testing.assert_close(
            summed / scale, expected / scale, **close, msg=lambda text, key=key: f"{key}: {text}"
        )


def language_model(layer):
    """One training step of a model with checkpointed activations under DDP, against one process."""
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=32, ssm_cfg={"layer": layer, **_small(layer)})
    whole = MambaLMHeadModel(config)
    model = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
    for block in model.backbone.layers:
        block.forward = _checkpointed(block.forward)
    world = dist.get_world_size()
    tokens = torch.randint(32, (2, 6 * world + 1), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    tokens = tokens.to(torch.empty(0).device)  # the default one
    F.cross_entropy(whole(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    model = DistributedDataParallel(model)
    inputs, targets = (split_sequence(part, dist.group.WORLD) for part in (tokens[:, :-1], tokens[:, 1:]))
    F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=f"d{name} differs")


def _small(layer):
    return {"d_state": 8} if layer == "Mamba1" else {"d_state": 8, "headdim": 8}


def _checkpointed(forward):
    return lambda *arguments, **options: checkpoint(forward, *arguments, use_reentrant=False, **options)


def fsdp2(layer):
    """Sharded parameters and a sequence in parts together, against one process."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        return  # torch before 2.6
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=32, ssm_cfg={"layer": layer, **_small(layer)})
    whole = MambaLMHeadModel(config)
    model = context_parallel(copy.deepcopy(whole), mesh)
    for block in model.backbone.layers:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    tokens = torch.randint(32, (1, 8 * mesh.size() + 1), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    F.cross_entropy(whole(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    inputs, targets = split_sequence(tokens[:, :-1], mesh), split_sequence(tokens[:, 1:], mesh)
    F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, expected.grad, rtol=1e-4, atol=1e-5, msg=f"d{name} differs")


def autocast():
    torch.manual_seed(0)
    for name in ("mamba", "mamba2", "mamba3"):
        whole = BLOCKS[name]()
        block = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
        x = same(1, 5 * dist.get_world_size(), 24)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = whole(x)
            out = block(split_sequence(x, dist.group.WORLD))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, split_sequence(expected, dist.group.WORLD), rtol=0.05, atol=0.02)
        out.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in block.parameters())


def compiled():
    torch.manual_seed(0)
    for name in ("mamba", "mamba2", "mamba3"):
        block = context_parallel(BLOCKS[name](), dist.group.WORLD)
        x = split_sequence(same(1, 4 * dist.get_world_size(), 24), dist.group.WORLD)
        torch.testing.assert_close(torch.compile(block, backend="eager")(x), block(x))


def refusals():
    group = dist.group.WORLD
    model = context_parallel(Mamba(16), group)
    x = torch.zeros(1, 4, 16)
    with pytest.raises(ValueError, match="Mamba: seq_idx is not supported with context_parallel"):
        model(x, seq_idx=torch.zeros(1, 4, dtype=torch.int32))
    assert context_parallel(model, None)(x).shape == x.shape  # off again: no rank waits for another
    with pytest.raises(ValueError, match="Mamba2: cu_seqlens is not supported with context_parallel"):
        context_parallel(Mamba2(16, headdim=8), group)(x, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    for block in (Mamba2, Mamba3):
        parallel = block(16, headdim=4, ngroups=4, process_group=group, sequence_parallel=False)
        with pytest.raises(ValueError, match=f"{block.__name__}: process_group is not supported with context_parallel"):
            context_parallel(parallel, group)(x)
    with pytest.raises(ValueError, match="every rank's part needs at least one step, got 0"):
        context_parallel(Mamba3(16, headdim=8), group)(x[:, :0])
    attention = MambaConfig(d_model=16, n_layer=2, vocab_size=32, attn_layer_idx=[1], attn_cfg={"num_heads": 2})
    with pytest.raises(ValueError, match=r"backbone\.layers\.1\.mixer is a MHA, which needs the whole sequence"):
        context_parallel(MambaLMHeadModel(attention), group)
    with pytest.raises(ValueError, match="the module is a Mamba2Simple, which needs the whole sequence"):
        context_parallel(Mamba2Simple(16, headdim=8), group)
    with pytest.raises(ValueError, match="the module is a BiMamba2, which needs the whole sequence"):
        context_parallel(BiMamba2(16, headdim=8), group)
    with pytest.raises(ValueError, match="no Mamba, Mamba2 or Mamba3 in this Linear"):
        context_parallel(torch.nn.Linear(2, 2), group)
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or a DeviceMesh, got str"):
        context_parallel(model, "world")
    hooked = context_parallel(Mamba(16), group)
    hooked.conv1d.register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match="context_parallel needs conv1d as it was made"):
        hooked(x)
    for block in (Mamba(16), Mamba2(16, headdim=8)):
        block.out_proj.requires_grad_(False)
        out, given = context_parallel(block, group)(x), next(block.parameters())
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(out.sum(), given, create_graph=True)


def norm_with_a_hook():
    """The operator ends before a norm that is more than its weight."""
    torch.manual_seed(0)
    whole = BLOCKS["mamba2_groups"]()
    block = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
    block.norm.register_forward_hook(lambda module, arguments, out: out * 1)
    x = leaf(same(2, 5 * dist.get_world_size(), whole.d_model))
    part = leaf(split_sequence(x, dist.group.WORLD))
    expected, out = whole(x), block(part)
    torch.testing.assert_close(out, split_sequence(expected, dist.group.WORLD), rtol=1e-4, atol=2e-5)
    expected.square().sum().backward()
    out.square().sum().backward()
    torch.testing.assert_close(part.grad, split_sequence(x.grad, dist.group.WORLD), rtol=1e-4, atol=1e-4)
    dist.all_reduce(block.norm.weight.grad)
    torch.testing.assert_close(block.norm.weight.grad, whole.norm.weight.grad, rtol=1e-4, atol=1e-4)


EVEN, UNEVEN, SHORT, LONG = [70], [5, 130, 3, 66], [2, 1, 0, 7], [1536, 1024]
CHECKS = {name: lambda name=name: blocks(name, UNEVEN) for name in BLOCKS}
CHECKS.update({f"{name}_even": lambda name=name: blocks(name, EVEN) for name in ("mamba", "mamba2", "mamba3")})
for name in ("mamba", "mamba2", "mamba3"):
    CHECKS[f"{name}_bfloat16"] = lambda name=name: blocks(name, UNEVEN, torch.bfloat16)
for name in ("mamba", "mamba2_groups"):
    CHECKS[f"{name}_short"] = lambda name=name: blocks(name, SHORT, batch=1)
CHECKS.update(
    {
        "mamba2_in_pieces": lambda: blocks("mamba2", LONG),
        "mamba2_in_pieces_no_norm": lambda: blocks("mamba2_no_norm", LONG),
        "mamba2_in_pieces_bfloat16": lambda: blocks("mamba2_groups", LONG, torch.bfloat16),
        "norm_with_a_hook": norm_with_a_hook,
        "first_part_empty": lambda: blocks("mamba2", [0, 6]),
        "empty_batch": lambda: blocks("mamba", [3], batch=0),
        "language_model_mamba": lambda: language_model("Mamba1"),
        "language_model_mamba2": lambda: language_model("Mamba2"),
        "language_model_mamba3": lambda: language_model("Mamba3"),
        "fsdp2": lambda: fsdp2("Mamba2"),
        "fsdp2_mamba": lambda: fsdp2("Mamba1"),
        "fsdp2_mamba3": lambda: fsdp2("Mamba3"),
        "autocast": autocast,
        "compiled": compiled,
        "refusals": refusals,
    }
)
