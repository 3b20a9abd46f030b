"""What each rank of tests/distributed runs: the loss of a head whose vocabulary is divided over the ranks."""

import pytest
import torch
import torch.distributed as dist

from _helpers.cases import assert_close_to_truth
from _helpers.ranks import leaf, mine, same
from mamba_ssm import MambaLMHeadModel
from mamba_ssm.distributed import distributed_utils as utils
from mamba_ssm.distributed import tensor_parallel as tp
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.ops import linear_cross_entropy as pieces


def loss_and_gradients(hidden, weight, labels, **options):
    """The loss and gradients of (2.5 times) it."""
    hidden, weight = leaf(hidden), leaf(weight)
    loss = pieces.linear_cross_entropy(hidden, weight, labels, **options)
    (2.5 * loss).backward()
    return {"loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}


LOSSES = [
    {},
    {"label_smoothing": 0.2, "reduction": "sum"},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3},
]


def loss_of_a_divided_vocabulary():
    """As of one process in float64; a token's logits near 1e4, at which a sum of exponentials' logarithm is inexact."""
    world, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight = same(2, 9, 16).double(), same(6 * world, 16, seed=1).double() / 2
    hidden[0, 0] *= 1e4
    labels = torch.randint(6 * world, (2, 9), generator=torch.Generator("cpu").manual_seed(2), device="cpu")
    labels = labels.to(hidden.device)
    cut, pieces._cut = pieces._cut, lambda tokens, vocabulary: 7
    try:
        for options in LOSSES:
            labels[:, 4] = options.get("ignore_index", -100)
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                given = hidden.to(dtype), weight.to(dtype)
                found = loss_and_gradients(given[0], mine(given[1]), labels, **options, process_group=group)
                of_one_process = [given, [tensor.double() for tensor in given]]
                plain, truth = (loss_and_gradients(*tensors, labels, **options) for tensors in of_one_process)
                for whole in (plain, truth):
                    whole["dweight"] = mine(whole["dweight"])
                assert_close_to_truth(found, plain, truth)
                assert torch.equal(utils.all_gather(found["loss"][None], group), found["loss"].expand(world))
    finally:
        pieces._cut = cut
    given = hidden.float(), mine(weight.float()), labels
    with torch.no_grad():
        loss = pieces.linear_cross_entropy(*given, process_group=group)
    assert torch.equal(loss, loss_and_gradients(*given, process_group=group)["loss"])
    with torch.autocast(hidden.device.type, torch.bfloat16):
        found = loss_and_gradients(*given, process_group=group)
    given = *(tensor.bfloat16() for tensor in given[:2]), labels
    assert torch.equal(found["loss"], loss_and_gradients(*given, process_group=group)["loss"])
    assert found["dweight"].dtype == torch.float32
    assert pieces.linear_cross_entropy(*given[:2], torch.full_like(labels, -100), process_group=group).isnan()


def loss_of_wrong_parts():
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    hidden, weight, labels = same(3, 8), mine(same(4 * world, 8)), torch.tensor([0, 4 * world - 1, 4 * world])
    if not hidden.is_cuda:
        with pytest.raises(ValueError, match=f"labels must lie in 0..{4 * world - 1}, .* got {4 * world}"):
            pieces.linear_cross_entropy(hidden, weight, labels, process_group=group)
    zeros = torch.zeros_like(labels)
    pieces.linear_cross_entropy(hidden, weight, zeros, process_group=group)  # sizes that are known
    rows = 3 if rank == 0 else 4
    with pytest.raises(ValueError, match=f"must have as many rows, got {rows} on this one and 3 to 4 on all"):
        pieces.linear_cross_entropy(hidden, weight[:rows], zeros, process_group=group)
    with pytest.raises(ValueError, match=f"must have as many tokens, got {rows - 1} on this one and 2 to 3 on all"):
        pieces.linear_cross_entropy(hidden[: rows - 1], weight, zeros[: rows - 1], process_group=group)
    if not hidden.is_cuda:
        with pytest.raises(ValueError, match=r"must have the same labels, .* give all ranks the same batch"):
            pieces.linear_cross_entropy(hidden, weight, zeros + rank, process_group=group)
    else:
        assert pieces.linear_cross_entropy(hidden, weight, zeros + rank, process_group=group).isnan()
    with pytest.raises(ValueError, match=r"process_group must be a process group .* got 'tp'"):
        pieces.linear_cross_entropy(hidden, weight, labels, process_group="tp")


def language_model(tied):
    """A model of parallel layers, as docs/distributed.md makes it, predicts its labels as the whole one does."""
    group = dist.group.WORLD
    layer = {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 4}
    options = {"d_model": 32, "n_layer": 1, "d_intermediate": 16, "vocab_size": 40, "tie_embeddings": tied}
    torch.manual_seed(0)
    whole = MambaLMHeadModel(MambaConfig(**options, ssm_cfg=layer))
    parallel = {"process_group": group, "sequence_parallel": False}
    model = MambaLMHeadModel(MambaConfig(**options, ssm_cfg={**layer, **parallel}))
    model.lm_head = tp.ColumnParallelLinear(32, 40, bias=False, **parallel)
    if tied and group.size() > 1:
        with pytest.raises(ValueError, match=r"lm_head.weight must have the embedding's shape, \(40, 32\), got"):
            model.tie_weights()
    model.backbone.embedding = tp.ParallelEmbeddings(32, 40, 0, **parallel)
    if tied:
        model.tie_weights()
        assert model.lm_head.weight is model.backbone.embedding.word_embeddings.weight
    mixer = whole.backbone.layers[0].mixer
    groups = mixer.ngroups * mixer.d_state
    inner = [mixer.d_inner, mixer.d_inner, groups, groups, mixer.nheads]

    def part(name, tensor):
        if "mixer" not in name:
            return mine(tensor) if "embedding" in name or "lm_head" in name else tensor
        sizes = inner if "in_proj" in name else inner[1:4] if "conv1d" in name else None
        if sizes:
            return torch.cat([mine(piece) for piece in tensor.split(sizes)])
        return mine(tensor, 1 if "out_proj" in name else 0)

    def whole_name(name):
        return name.replace("word_embeddings.", "")

    values = whole.state_dict()
    model.load_state_dict({name: part(name, values[whole_name(name)]) for name in model.state_dict()})
    tokens = torch.randint(40, (2, 9), generator=torch.Generator("cpu").manual_seed(2), device="cpu")
    tokens = tokens.to(whole.lm_head.weight.device)
    for more in ({}, {"num_last_tokens": 5}, {"num_items_in_batch": 7}):
        expected, found = (one(tokens, labels=tokens, label_smoothing=0.1, **more).loss for one in (whole, model))
        torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = part(name, grads[whole_name(name)])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=f"d{name} differs")
    torch.testing.assert_close(model(tokens).logits, mine(whole(tokens).logits, 2))
    model.lm_head.sequence_parallel = True
    with pytest.raises(ValueError, match=r"ColumnParallelLinear with .*, got sequence_parallel=True"):
        model(tokens, labels=tokens)


CHECKS = {
    "loss_of_a_divided_vocabulary": loss_of_a_divided_vocabulary,
    "loss_of_wrong_parts": loss_of_wrong_parts,
    "language_model": lambda: language_model(False),
    "tied_language_model": lambda: language_model(True),
}
