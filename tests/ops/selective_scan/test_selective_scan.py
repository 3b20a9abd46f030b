"""selective_scan_fn: values and gradients against the float64 reference, memory layouts, and options."""

from dataclasses import replace

import pytest
import torch
from _helpers import by_turns
from _helpers.cases import (
    DTYPES,
    REVERSE_CASES,
    SCAN_CASES,
    ScanCase,
    assert_close_to_truth,
    case_id,
    dtype_id,
    outputs_and_gradients,
)

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
from mamba_ssm.utils.kernels import without


def scan(function, case):
    def run(**tensors):
        return function(**tensors, delta_softplus=case.softplus, return_last_state=True, reverse=case.reverse)

    return run


def check(case, dtype, device, tensors=None):
    tensors = tensors or case.inputs(dtype, device)
    found = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
    plain = outputs_and_gradients(scan(selective_scan_ref, case), tensors)
    truth = outputs_and_gradients(scan(selective_scan_ref, case), tensors, torch.float64)
    assert found["out0"].dtype == dtype
    assert found["out1"].dtype == torch.float32
    assert_close_to_truth(found, plain, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", SCAN_CASES + REVERSE_CASES, ids=case_id)
def test_values_and_gradients(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.parametrize("case", REVERSE_CASES, ids=case_id)
def test_reverse_is_the_scan_of_flipped_inputs(case):
    tensors = case.inputs(torch.float64, "cpu")
    found = outputs_and_gradients(scan(selective_scan_ref, case), tensors)

    def flipped(**tensors):
        for name in ("u", "delta", "z", "B", "C", "seq_idx"):
            if tensors[name] is not None and tensors[name].shape[-1] == case.seqlen:  # not constant B and C
                tensors[name] = tensors[name].flip(-1)
        out, state = scan(selective_scan_ref, replace(case, reverse=False))(**tensors)
        return out.flip(-1), state

    for name, expected in outputs_and_gradients(flipped, tensors).items():
        torch.testing.assert_close(found[name], expected)


# CUDA splits these: segments of every slice of states, whole and partial ones, two blocks of channels and two of batch.
SPLIT_CASES = (
    ScanCase(2, 40, 1096, initial_state=True),
    ScanCase(2, 64, 1088, groups=2, initial_state=True),
    ScanCase(2, 256, 1088, initial_state=True),  # whole tiles
    ScanCase(2, 24, 704, dstate=5, initial_state=True, seq_idx=True),
    ScanCase(2, 48, 1030, variable_B=False, variable_C=False, initial_state=True),
    ScanCase(2, 20, 600, dstate=100, initial_state=True),
    ScanCase(2, 20, 640, dstate=33, initial_state=True, seq_idx=True),
    ScanCase(2, 20, 577, dstate=64, initial_state=True),
    ScanCase(2, 64, 576, dstate=64, initial_state=True),  # whole tiles
    ScanCase(2, 64, 576, dstate=128, initial_state=True),
    ScanCase(2, 40, 1096, initial_state=True, reverse=True),
    ScanCase(2, 24, 703, dstate=5, initial_state=True, seq_idx=True, reverse=True),
)


@by_turns.parameters(SPLIT_CASES, (torch.float32, torch.bfloat16), for_cuda=True)
def test_split_lengths(case, dtype, device):
    tensors = case.inputs(dtype, device)
    tensors["delta"] -= 1  # so that a state outlives a segment
    if case.seq_idx:  # some segments restart, others pass on what comes in
        starts = torch.tensor([150, 400], device=device)
        steps = torch.arange(case.seqlen, device=device)
        tensors["seq_idx"] = (steps[:, None] >= starts).sum(1, dtype=torch.int32).expand(case.batch, -1).contiguous()
    check(case, dtype, device, tensors)


# CUDA's pipelined forward scan takes these, by their number and the multiprocessors: 12, 16, 32 or 40 channels a block,
# 16 and 40 of whole tiles alone. Of whole tiles, 128 blocks have a multiprocessor each.
PIPELINE_CASES = (
    ScanCase(1, 1, 72),
    ScanCase(2, 13, 1000, initial_state=True),
    ScanCase(2, 40, 328, dstate=9, groups=2, z=False),
    ScanCase(1, 1500, 136, dstate=13, D=False, initial_state=True),
    ScanCase(2, 1000, 200, softplus=False),
    ScanCase(1, 3001, 200, initial_state=True),
    ScanCase(1, 4240, 72),
    ScanCase(1, 1500, 1096),
    ScanCase(2, 24, 128, initial_state=True),  # whole tiles
    ScanCase(1, 1536, 128, initial_state=True),
    ScanCase(2, 1024, 128),
    ScanCase(1, 4096, 128, initial_state=True),
    ScanCase(1, 5120, 128),
    ScanCase(2, 13, 1000, dstate=8, initial_state=True),
    ScanCase(2, 1000, 200, dstate=5, z=False),
    ScanCase(2, 13, 1000, dstate=7, reverse=True),
    ScanCase(2, 13, 1000, initial_state=True, reverse=True),
    ScanCase(1, 1500, 136, dstate=13, reverse=True),
    ScanCase(1, 3001, 200, initial_state=True, reverse=True),
)
# And these are too many channels for it, and too many to be split. 205 steps: rows that begin anywhere.
MANY_CHANNELS = (
    ScanCase(6, 1024, 136),
    ScanCase(8, 1536, 136, initial_state=True),
    ScanCase(6, 1536, 72, z=False),
    ScanCase(6, 1536, 205),
    ScanCase(8, 1536, 205),
    ScanCase(8, 1536, 129),  # whole tiles and a step
    ScanCase(8, 1536, 128, initial_state=True),  # whole tiles
    ScanCase(8, 1536, 128, initial_state=True, reverse=True),
    ScanCase(17, 1536, 64, initial_state=True),  # blocks of 64 channels
    ScanCase(17, 1536, 64, reverse=True),
    ScanCase(17, 256, 96, dstate=64, initial_state=True),
    ScanCase(17, 256, 96, dstate=128, initial_state=True),
    ScanCase(2, 32, 64, dstate=64),  # whole tiles of backward, too
    ScanCase(8, 1536, 136, initial_state=True, reverse=True),
    ScanCase(6, 1536, 205, reverse=True),
    ScanCase(8, 800, 196, dstate=1, groups=4, z=False),
    ScanCase(7, 1000, 261, dstate=1, z=False, softplus=False, initial_state=True, reverse=True),
    ScanCase(8, 800, 196, dstate=2, groups=4, z=False, reverse=True),
    ScanCase(7, 1001, 389, dstate=3, z=False, initial_state=True),
    ScanCase(8, 1024, 388, dstate=4, groups=2, z=False, initial_state=True),
)


@by_turns.parameters(PIPELINE_CASES, for_cuda=True)
def test_few_channels(case, dtype, device):
    check(case, dtype, device)


# Whose states cross lanes on a GPU that they fill: rows in fours and not, either way; an odd number of channels.
FEW_STATES_CASES = [
    ScanCase(3, 40, 300, dstate=1, groups=2, z=False, initial_state=True),
    ScanCase(2, 33, 517, dstate=1, z=False, D=False),  # ends within a lane's steps
    ScanCase(2, 37, 516, dstate=1, z=False, delta_bias=False, reverse=True),
    ScanCase(3, 34, 259, dstate=1, z=False, initial_state=True, reverse=True),
    ScanCase(3, 40, 384, dstate=2, groups=2, z=False),  # whole tiles
    ScanCase(2, 37, 293, dstate=3, z=False, softplus=False, initial_state=True),
    ScanCase(3, 35, 356, dstate=4, z=False, initial_state=True),
    ScanCase(3, 40, 292, dstate=4, groups=2, z=False, initial_state=True, reverse=True),
    ScanCase(2, 33, 389, dstate=2, z=False, reverse=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", FEW_STATES_CASES, ids=case_id)
def test_few_states(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", MANY_CHANNELS, ids=case_id)
def test_many_channels(case, dtype, cuda_kernels):
    check(case, dtype, cuda_kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_backward_with_little_shared_memory(dtype, cuda_kernels):
    with without("selective_scan_backward/sliced"):  # as where a block may have 64 KB
        check(ScanCase(2, 12, 130, dstate=40, initial_state=True), dtype, cuda_kernels)


@pytest.mark.parametrize("seqlen", [70, 80])  # both end within a tile
def test_states_that_decay_at_once(seqlen, device):
    tensors = ScanCase(1, 6, seqlen).inputs(torch.float32, device)
    tensors["A"] = torch.full_like(tensors["A"], -float("inf"))
    options = {"delta_softplus": True, "return_last_state": True}
    expected = selective_scan_ref(**tensors, **options)
    torch.testing.assert_close(selective_scan_fn(**tensors, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen", [70, 80])
def test_gradients_of_states_that_decay_at_once(seqlen, device):
    """As with an A that is as good as infinite: the other channels', and 0 where torch's would be 0 times infinity."""
    case = ScanCase(1, 6, seqlen, initial_state=True)
    tensors = case.inputs(torch.float32, device)
    tensors["A"][2] = -1e30
    expected = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
    tensors["A"][2] = -float("inf")
    for name, found in outputs_and_gradients(scan(selective_scan_fn, case), tensors).items():
        assert found.isfinite().all(), name
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seqlen", [75, 136])  # the longer one is for CUDA's pipelined forward scan
@pytest.mark.parametrize("layout", ["channel_major", "channel_last", "slice", "expanded"])
def test_any_strides(layout, seqlen, device):
    case = ScanCase(3, 10, seqlen)
    tensors = case.inputs(torch.float32, device)
    for name in ("u", "delta", "z"):
        tensor = tensors[name]
        if layout == "channel_major":
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "channel_last":
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "slice":
            tensor = torch.cat([tensor, tensor], dim=1)[:, 10:]
        else:
            tensor = tensor[:1].expand(3, -1, -1)
        tensors[name] = tensor
    strided = selective_scan_fn(**tensors, delta_softplus=True)
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}
    torch.testing.assert_close(strided, selective_scan_fn(**dense, delta_softplus=True), rtol=1e-5, atol=1e-5)
    strided_grads = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
    dense_grads = outputs_and_gradients(scan(selective_scan_fn, case), dense)
    for name, grad in dense_grads.items():
        torch.testing.assert_close(strided_grads[name], grad, rtol=1e-4, atol=1e-4)


def test_three_dimensional_matrices_are_one_group(device):
    tensors = ScanCase(2, 6, 40).inputs(torch.float32, device)
    expected = selective_scan_fn(**tensors)
    tensors["B"], tensors["C"] = tensors["B"].squeeze(1), tensors["C"].squeeze(1)
    assert torch.equal(selective_scan_fn(**tensors), expected)


def test_arguments_by_position(device):
    tensors = ScanCase(2, 6, 40).inputs(torch.float32, device)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    out, last_state = selective_scan_fn(*(tensors[name] for name in names), True, True)
    expected = selective_scan_fn(**tensors, delta_softplus=True)
    assert torch.equal(out, expected)
    assert last_state.shape == (2, 6, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_narrow_parameters_are_widened(dtype, device):
    tensors = ScanCase(2, 6, 40, initial_state=True, variable_B=False).inputs(dtype, device)
    narrow = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    wide = dict(narrow)
    for name in ("A", "B", "D", "delta_bias", "initial_state"):
        wide[name] = narrow[name].float()
    assert torch.equal(selective_scan_fn(**narrow), selective_scan_fn(**wide))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_chunks_chained_through_the_state(dtype, device):
    tensors = ScanCase(2, 7, 150).inputs(dtype, device)
    whole, whole_state = selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
    state, parts = None, []
    for part in (slice(0, 1), slice(1, 65), slice(65, 128), slice(128, 150)):
        chunk = {**tensors, "initial_state": state}
        for name in ("u", "delta", "z", "B", "C"):
            chunk[name] = tensors[name][..., part]
        out, state = selective_scan_fn(**chunk, delta_softplus=True, return_last_state=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
    torch.testing.assert_close(state, whole_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)], ids=["no_batch", "no_channels", "no_steps"])
def test_empty_sizes(shape, device):
    case = ScanCase(*shape, initial_state=True)
    results = outputs_and_gradients(scan(selective_scan_fn, case), case.inputs(torch.float32, device))
    truth = outputs_and_gradients(scan(selective_scan_ref, case), case.inputs(torch.float32, device))
    assert results["out0"].shape == shape
    for name, grad in results.items():
        torch.testing.assert_close(grad, truth.get(name, torch.zeros_like(grad)))


@pytest.mark.parametrize("dstate", [16, 64, 128])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_no_steps_of_a_call_like_mambas(dstate, reverse, device):
    """Kernels whose tiles are all whole would read one, though there is nothing to read."""
    states = torch.randn(1, 64, dstate, device=device)
    last, A, D = torch.empty_like(states), -torch.rand(64, dstate, device=device), torch.ones(64, device=device)
    params = abi.MambaSelectiveScan(batch=1, dim=64, seqlen=0, dstate=dstate, ngroups=1, segments=1, reverse=reverse)
    params.dtype, params.delta_softplus, params.variable_B, params.variable_C = abi.BFLOAT16, 1, 1, 1
    params.z = torch.empty(8, dtype=torch.bfloat16, device=device).data_ptr()  # the others NULL, as of empty tensors
    params.A, params.D, params.initial_state, params.last_state = (x.data_ptr() for x in (A, D, states, last))
    run(place(params, A), "selective_scan_forward", params)
    torch.testing.assert_close(last, states, rtol=0, atol=0)


def test_only_the_last_state_is_used(device):
    case = ScanCase(2, 6, 70, initial_state=True)
    tensors = case.inputs(torch.float32, device)

    def last_state(function):
        return lambda **t: function(**t, delta_softplus=True, return_last_state=True)[1]

    found = outputs_and_gradients(last_state(selective_scan_fn), tensors)
    truth = outputs_and_gradients(last_state(selective_scan_ref), tensors)
    for name, grad in truth.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4)


def test_gradient_of_some_arguments_only(device):
    tensors = ScanCase(2, 6, 70).inputs(torch.float32, device)
    tensors["A"].requires_grad_()
    selective_scan_fn(**tensors).sum().backward()
    assert tensors["A"].grad is not None
    assert tensors["u"].grad is None


def test_large_delta_and_nan_stay_in_their_channel(device):
    tensors = ScanCase(1, 6, 70).inputs(torch.float32, device)
    tensors["delta"][0, 1] = 50.0
    expected = selective_scan_ref(**tensors, delta_softplus=True)
    torch.testing.assert_close(selective_scan_fn(**tensors, delta_softplus=True), expected, rtol=1e-4, atol=1e-4)
    tensors["u"][0, 2, 5] = float("nan")
    out = selective_scan_fn(**tensors, delta_softplus=True)
    assert out[0, 2, 5:].isnan().all()
    out[0, 2] = 0
    assert out.isfinite().all()


def test_deterministic_backward(device):
    case = ScanCase(4, 96, 300)
    tensors = case.inputs(torch.bfloat16, device)
    try:
        torch.use_deterministic_algorithms(True)
        first = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
        second = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    free = outputs_and_gradients(scan(selective_scan_fn, case), tensors)
    for name, tensor in first.items():
        torch.testing.assert_close(free[name], tensor, rtol=2e-2, atol=2e-2 * tensor.abs().max().item())


@pytest.mark.gpu
def test_split_length_in_a_cuda_graph(cuda):
    """Few channels: the length is split, and from sm_90 on the second launch overlaps with the first."""
    tensors = ScanCase(1, 64, 2048, initial_state=True).inputs(torch.bfloat16, cuda)
    leaves = [tensor.requires_grad_() for tensor in tensors.values() if tensor is not None]

    def run():
        out, state = selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
        return [out, state, *torch.autograd.grad(out.float().square().sum() + state.square().sum(), leaves)]

    stream = torch.cuda.Stream()  # a graph's first run allocates what must not be allocated in it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    with torch.no_grad():
        tensors["u"].mul_(2)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for found, expected in zip(results, run(), strict=True):  # atomics add up in any order
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


def test_saved_memory_is_inputs_and_checkpoints(device):
    case = ScanCase(2, 64, 640, z=False)
    tensors = case.inputs(torch.float32, device)
    saved = []
    for tensor in tensors.values():
        if tensor is not None:
            tensor.requires_grad_()

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selective_scan_fn(**tensors, delta_softplus=True)
    inputs = {tensor.data_ptr() for tensor in tensors.values() if tensor is not None}
    extra = [tensor for tensor in saved if tensor.data_ptr() not in inputs]
    assert len(extra) == 1
    assert extra[0].numel() <= 2 * 9 * 64 * 16 + 2


def test_saved_memory_that_comes_back_otherwise_is_refused(device):
    """What forward has checked is not checked again in backward, unless hooks may have changed it."""
    tensors = ScanCase(1, 8, 40).inputs(torch.float32, device)
    u = tensors["u"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor.bfloat16() if tensor.dim() == 2 else tensor
    ):
        out = selective_scan_fn(**tensors, delta_softplus=True)
    with pytest.raises(TypeError, match="selective_scan: A must be float32"):
        out.sum().backward()
    assert u.grad is None
