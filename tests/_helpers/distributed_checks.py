"""What each rank of tests/distributed runs: parallel layers against the whole layer, computed by every rank."""

import types

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from _helpers import divided_vocabulary_checks
from _helpers.ranks import leaf, mine, same
from mamba_ssm import Mamba2, Mamba3
from mamba_ssm.distributed import distributed_utils as utils
from mamba_ssm.distributed import tensor_parallel as tp


def check_gradients(block, whole, part):
    """A rank's gradients are its parts, part(name, tensor), of those of the whole layer."""
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(
            parameter.grad, part(name, grads[name]), rtol=1e-4, atol=1e-4, msg=f"d{name} differs"
        )


def collectives():
    rank, world = dist.get_rank(), dist.get_world_size()
    x = leaf(same(2, 3, seed=rank))
    everyone = [same(2, 3, seed=other) for other in range(world)]
    gathered = utils.all_gather(x, None)
    torch.testing.assert_close(gathered, torch.cat(everyone))
    # each rank weights the result in its own way: the gradient is the sum of these
    gathered.backward((rank + 1.0) * torch.ones_like(gathered))
    torch.testing.assert_close(x.grad, torch.full((2, 3), sum(range(1, world + 1))).float())

    x = leaf(same(2 * world, 3, seed=rank))
    total = sum(same(2 * world, 3, seed=other) for other in range(world))
    scattered = utils.reduce_scatter(x, None)
    torch.testing.assert_close(scattered, mine(total))
    scattered.backward((rank + 1.0) * torch.ones_like(scattered))
    torch.testing.assert_close(x.grad[:, 0], torch.arange(1.0, world + 1).repeat_interleave(2))

    x = leaf(same(5, seed=rank))
    reduced = utils.all_reduce(x, None)
    torch.testing.assert_close(reduced, sum(same(5, seed=other) for other in range(world)))
    reduced.sum().backward()
    assert x.grad.eq(1).all()

    view = same(3, 2 * world, seed=rank).t()  # not contiguous
    for function in (utils.all_gather_raw, utils.reduce_scatter_raw, utils.all_reduce_raw):
        output, handle = function(view, None, async_op=True)
        handle.wait()
        torch.testing.assert_close(output, function(view, None)[0])
        assert function(view[:0], None)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="first dimension must be a multiple of the"):
        utils.reduce_scatter(torch.zeros(2 * world + 1, 3), None)


def shared_parameters():
    rank, world = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, float(rank))
    nn.init.constant_(module.bias, float(rank))
    module.weight._shared_params = True
    utils.sync_shared_params(module, None)
    assert module.weight.eq(0).all() and module.bias.eq(rank).all()
    module.bias._sequence_parallel = True
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    utils.allreduce_sequence_parallel_grad(module, None)
    assert module.bias.grad.eq(world).all() and module.weight.grad.eq(1).all()


def linear_layers(sequence_parallel):
    world = dist.get_world_size()
    whole_x, first, second = same(3 * world, 6), same(4 * world, 6, seed=1), same(5, 4 * world, seed=2)
    first_bias, second_bias, dout = same(4 * world, seed=3), same(5, seed=4), same(3 * world, 5, seed=5)
    expected = [leaf(tensor) for tensor in (whole_x, first, first_bias, second, second_bias)]
    x, *weights = expected
    whole_out = nn.functional.linear(nn.functional.linear(x, weights[0], weights[1]).relu(), weights[2], weights[3])
    whole_out.backward(dout)

    group = dist.group.WORLD
    column = tp.ColumnParallelLinear(6, 4 * world, group, sequence_parallel=sequence_parallel)
    row = tp.RowParallelLinear(4 * world, 5, group, sequence_parallel=sequence_parallel)
    assert (row.bias is None) == (dist.get_rank() > 0)
    parts = [mine(first), mine(first_bias), mine(second, 1), second_bias]
    parameters = [column.weight, column.bias, row.weight, row.bias]
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter is not None:
                parameter.copy_(part)
    split = mine if sequence_parallel else (lambda tensor: tensor)
    x = leaf(split(whole_x))
    out = row(column(x).relu())
    torch.testing.assert_close(out, split(whole_out))
    out.backward(split(dout))
    torch.testing.assert_close(x.grad, split(expected[0].grad))
    slices = [mine(expected[1].grad), mine(expected[2].grad), mine(expected[3].grad, 1), expected[4].grad]
    for parameter, grad in zip(parameters, slices, strict=True):
        if parameter is not None:
            torch.testing.assert_close(parameter.grad, grad)

    # a tensor of three dimensions, under autocast, with a weight that is not trained
    column.weight.requires_grad_(False)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = column(leaf(split(same(world, 2, 6))))
    assert out.dtype == torch.bfloat16 and out.shape == (world, 2, 4)
    out.sum().backward()
    assert column.bias.grad.dtype == torch.float32


def uneven_linear():
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    column = tp.ColumnParallelLinear(6, 8 * world + 8, group, bias=False, multiple_of=8)
    assert column.weight.shape == (16 if rank == 0 else 8, 6)
    assert tp.RowParallelLinear(8 * world + 8, 6, group, multiple_of=8).weight.shape == (6, 16 if rank == 0 else 8)
    with pytest.raises(ValueError, match=r"dim \(12\) must be a multiple of multiple_of \(8\)"):
        tp.ColumnParallelLinear(6, 12, group, multiple_of=8)
    with pytest.raises(ValueError, match=f"out_features .8, in multiples of 8. cannot be split over {world} ranks"):
        tp.ColumnParallelLinear(6, 8, group, multiple_of=8)


def embeddings():
    world, group = dist.get_world_size(), dist.group.WORLD
    vocabulary, width, positions = 6 * world, 4 * world, 8
    words, places = leaf(same(vocabulary, width)), leaf(same(positions, width, seed=1))
    ids = torch.randint(0, vocabulary, (world, 5), generator=torch.Generator().manual_seed(2))
    whole = (words[ids] + places[:5]).flatten(0, 1)
    dout = same(*whole.shape, seed=3)
    whole.backward(dout)
    for sequence_parallel in (True, False):
        split = mine if sequence_parallel else (lambda tensor: tensor)
        layer = tp.ParallelEmbeddings(width, vocabulary, positions, group, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            layer.word_embeddings.weight.copy_(mine(words))
            layer.position_embeddings.weight.copy_(mine(places, 1))
        out = layer(ids, combine_batch_seqlen_dim=True)
        torch.testing.assert_close(out, split(whole))
        torch.testing.assert_close(layer(ids), split(whole.view(world, 5, width)))
        out.backward(split(dout))
        torch.testing.assert_close(layer.word_embeddings.weight.grad, mine(words.grad))
        torch.testing.assert_close(layer.position_embeddings.weight.grad, mine(places.grad, 1))
    alone = tp.ParallelEmbeddings(8, 10, 0, None, padding_idx=1)
    assert alone(torch.tensor([[1, 2]])).shape == (1, 2, 8)
    with pytest.raises(ValueError, match="padding_idx is not supported with a process_group, got padding_idx 1"):
        tp.VocabParallelEmbedding(vocabulary, 8, process_group=group, padding_idx=1)
    with pytest.raises(ValueError, match=f"num_embeddings must be a multiple of the {world} ranks"):
        tp.VocabParallelEmbedding(vocabulary + 1, 8, process_group=group)


MAMBA2 = {"d_state": 16, "headdim": 4, "ngroups": 4, "d_ssm": 32, "bias": True, "layer_idx": 0}


def _parallel_mamba2(sequence_parallel, fast):
    """A whole block, this rank's part of it, and a function from parameter name and whole tensor to the part."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    whole = Mamba2(24, use_mem_eff_path=fast, **MAMBA2)
    options = {"process_group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "use_mem_eff_path": fast}
    block = Mamba2(24, **MAMBA2, **options)
    ssm, mlp, group, heads = whole.d_ssm, whole.d_inner - whole.d_ssm, whole.ngroups * whole.d_state, whole.nheads
    assert (block.d_ssm, block.nheads, block.ngroups) == (ssm // world, heads // world, 4 // world)
    sizes = {
        "in_proj.weight": [mlp, mlp, ssm, ssm, group, group, heads],
        "in_proj.bias": [mlp, mlp, ssm, ssm, group, group, heads],
        "conv1d.weight": [ssm, group, group],
        "conv1d.bias": [ssm, group, group],
        "out_proj.weight": [mlp, ssm],
    }

    def part(name, tensor):
        if name == "out_proj.bias":
            return tensor
        dim = 1 if name == "out_proj.weight" else 0
        pieces = tensor.split(sizes.get(name, tensor.shape[dim]), dim)
        return torch.cat([mine(piece, dim) for piece in pieces], dim)

    block.load_state_dict({name: part(name, whole.state_dict()[name]) for name in block.state_dict()})
    return whole, block, part


def mamba2(sequence_parallel, fast, hooked=False):
    world, seqlen = dist.get_world_size(), 7
    whole, block, part = _parallel_mamba2(sequence_parallel, fast)
    split = mine if sequence_parallel else (lambda tensor: tensor)
    whole_x, dout = leaf(same(world * seqlen, 24)), same(world * seqlen, 24, seed=1)
    whole_out = whole(whole_x, seqlen=seqlen)
    whole_out.backward(dout)
    x = leaf(split(whole_x))
    calls = []
    if hooked:  # then out_proj is called, and does its own collective
        block.out_proj.register_forward_hook(lambda *call: calls.append(call))
    out = block(x, seqlen=seqlen)
    assert len(calls) == hooked
    torch.testing.assert_close(out, split(whole_out), rtol=1e-4, atol=1e-5)
    out.backward(split(dout))
    torch.testing.assert_close(x.grad, split(whole_x.grad), rtol=1e-4, atol=1e-4)
    check_gradients(block, whole, part)


@torch.no_grad()
def mamba2_inference(sequence_parallel):
    world = dist.get_world_size()
    whole, block, _ = _parallel_mamba2(sequence_parallel, True)
    x = same(world, 6, 24)
    expected = whole(x)
    split = mine if sequence_parallel else (lambda tensor: tensor)
    cache = types.SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    found = []
    for start, end in ((0, 2), (2, 4), (4, 5), (5, 6)):
        cache.seqlen_offset = start
        found.append(block(split(x[:, start:end]), inference_params=cache))
    torch.testing.assert_close(torch.cat(found, 1), split(expected), rtol=1e-4, atol=1e-5)


def mamba2_sizes():
    world, group = dist.get_world_size(), dist.group.WORLD
    with pytest.raises(ValueError, match=f"ngroups must be a multiple of the {world} ranks of process_group, got 1"):
        Mamba2(24, headdim=4, process_group=group)
    with pytest.raises(ValueError, match=f"expand . d_model must be a multiple of the {world} ranks of process_group"):
        Mamba2(21, expand=3, headdim=4, d_ssm=16, ngroups=4, process_group=group)


MAMBA3 = {
    "siso": {},  # one group
    "mimo": {"ngroups": 4, "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
}


def _parallel_mamba3(kind, sequence_parallel):
    """As _parallel_mamba2."""
    options = {"d_state": 16, "headdim": 6, "layer_idx": 0, **MAMBA3[kind]}
    world = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    block = Mamba3(24, **options, process_group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    shared = utils.all_gather(block.in_proj.weight[-4:], None)
    assert torch.equal(shared, shared[:4].repeat(world, 1)), "what all ranks have starts otherwise on some"
    torch.manual_seed(0)
    whole = Mamba3(24, **options)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "proj" not in name and name != "dt_bias":
                parameter.add_(0.3 * torch.randn_like(parameter))
    groups = 4 // world if kind == "mimo" else 1
    assert (block.nheads, block.d_inner, block.num_bc_heads) == (8 // world, 48 // world, groups)

    def part(name, tensor):
        if name == "in_proj.weight":
            pieces = tensor.split(whole._parts)
            whole_on_each = {7} if kind == "mimo" else {2, 3, 7}  # angles; B and C of one group
            groups = (whole.mimo_rank, whole.num_bc_heads, whole.d_state, 24)

            def mine_of(i, piece):
                if i in whole_on_each:
                    return piece
                return mine(piece.view(groups), 1).flatten(0, 2) if i in (2, 3) else mine(piece)

            return torch.cat([mine_of(i, piece) for i, piece in enumerate(pieces)])
        if name in ("B_norm.weight", "C_norm.weight"):
            return tensor
        return mine(tensor, 1 if name == "out_proj.weight" else 0)

    block.load_state_dict({name: part(name, whole.state_dict()[name]) for name in block.state_dict()})
    return whole, block, part


def mamba3(kind, sequence_parallel):
    world = dist.get_world_size()
    whole, block, part = _parallel_mamba3(kind, sequence_parallel)
    split = mine if sequence_parallel else (lambda tensor: tensor)
    whole_x, dout = leaf(same(world, 7, 24)), same(world, 7, 24, seed=1)
    whole_out = whole(whole_x)
    whole_out.backward(dout)
    x = leaf(split(whole_x))
    out = block(x)
    torch.testing.assert_close(out, split(whole_out), rtol=1e-4, atol=1e-5)
    out.backward(split(dout))
    torch.testing.assert_close(x.grad, split(whole_x.grad), rtol=1e-4, atol=1e-4)
    check_gradients(block, whole, part)


@torch.no_grad()
def mamba3_inference(kind, sequence_parallel):
    world = dist.get_world_size()
    whole, block, _ = _parallel_mamba3(kind, sequence_parallel)
    x = same(world, 6, 24)
    expected = whole(x)
    split = mine if sequence_parallel else (lambda tensor: tensor)
    cache = types.SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    found = []
    for start, end in ((0, 2), (2, 4), (4, 5), (5, 6)):
        cache.seqlen_offset = start
        found.append(block(split(x[:, start:end]), inference_params=cache))
    torch.testing.assert_close(torch.cat(found, 1), split(expected), rtol=1e-4, atol=1e-5)
    if not sequence_parallel:  # whose batch is shared out: packed sequences have one row
        cu_seqlens = torch.tensor([0, 2, 6])
        apart = torch.cat([whole(x[:1, :2]), whole(x[:1, 2:])], 1)
        torch.testing.assert_close(block(x[:1], cu_seqlens=cu_seqlens), apart, rtol=1e-4, atol=1e-5)


def mamba3_sizes():
    world, group = dist.get_world_size(), dist.group.WORLD
    with pytest.raises(ValueError, match=f"the heads must be a multiple of the {world} ranks of process_group, got 3"):
        Mamba3(24, headdim=16, process_group=group)
    with pytest.raises(ValueError, match=f"ngroups must be 1 or a multiple of the {world} ranks of process_group"):
        Mamba3(24, headdim=4, ngroups=3, process_group=group)


CHECKS = {
    "collectives": collectives,
    "shared_parameters": shared_parameters,
    "linear_layers": lambda: linear_layers(False),
    "linear_layers_sequence_parallel": lambda: linear_layers(True),
    "uneven_linear": uneven_linear,
    "embeddings": embeddings,
    "mamba2": lambda: mamba2(False, True),
    "mamba2_slow_path": lambda: mamba2(False, False),
    "mamba2_sequence_parallel": lambda: mamba2(True, True),
    "mamba2_sequence_parallel_slow_path": lambda: mamba2(True, False),
    "mamba2_hooked": lambda: mamba2(False, True, hooked=True),
    "mamba2_hooked_sequence_parallel": lambda: mamba2(True, True, hooked=True),
    "mamba2_inference": lambda: mamba2_inference(False),
    "mamba2_inference_sequence_parallel": lambda: mamba2_inference(True),
    "mamba2_sizes": mamba2_sizes,
    "mamba3": lambda: mamba3("siso", False),
    "mamba3_sequence_parallel": lambda: mamba3("siso", True),
    "mamba3_mimo": lambda: mamba3("mimo", False),
    "mamba3_mimo_sequence_parallel": lambda: mamba3("mimo", True),
    "mamba3_inference": lambda: mamba3_inference("siso", False),
    "mamba3_mimo_inference": lambda: mamba3_inference("mimo", False),
    "mamba3_inference_sequence_parallel": lambda: mamba3_inference("mimo", True),
    "mamba3_sizes": mamba3_sizes,
    **divided_vocabulary_checks.CHECKS,
}
