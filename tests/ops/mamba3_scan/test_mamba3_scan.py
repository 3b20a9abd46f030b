"""mamba3_scan: values and gradients against the float64 reference, memory layouts, what inputs may be, errors."""

import pytest
import torch
from _helpers import by_turns
from _helpers.cases import (
    DTYPES,
    assert_close_to_truth,
    case_id,
    dtype_id,
    leaf,
    output_and_kept,
    outputs_and_gradients,
)
from _helpers.mamba3_cases import MAMBA3_CASES, Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan, mamba3_scan_ref
from mamba_ssm.ops.mamba3_scan.arguments import Inputs
from mamba_ssm.ops.mamba3_scan.backward import MOST_CUDA_RANK

# What one result may be off, relative to its largest value, beside twice plain torch's error: sums in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# On CUDA 16-bit factors go into tensor cores as they are, and states wait for backward in 16 bits.
CUDA_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check(case, dtype, device, tolerance):
    tensors = case.inputs(dtype, device)
    found = outputs_and_gradients(case.run(mamba3_scan), tensors)
    plain = outputs_and_gradients(case.run(mamba3_scan_ref), tensors)
    truth = outputs_and_gradients(case.run(mamba3_scan_ref), tensors, torch.float64)
    assert found["out0"].dtype == dtype
    for result, other in ((found, truth), (plain, truth)):
        for name, value in other.items():  # an input without an effect: torch has no gradient, or zeros
            result.setdefault(name, torch.zeros_like(value))
        for name in [name for name in result if name not in other]:
            assert not result.pop(name).any()
    assert_close_to_truth(found, plain, truth, tolerance[dtype])


@by_turns.parameters(MAMBA3_CASES)
def test_values_and_gradients(case, dtype, device, kernels):
    if kernels == "cuda" and device == "cpu" and case.rank > MOST_CUDA_RANK:
        pytest.skip("no backward kernel has this rank; torch's operators take its place for tensors of a real GPU")
    check(case, dtype, device, CUDA_TOLERANCE if kernels == "cuda" else TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "case",
    [
        Mamba3Case(2, 200, 4, 40, dstate=72, nangles=20, groups=2, rank=2, norm=True, states=True),
        Mamba3Case(2, 70, 4, 64, dstate=128, nangles=32, rank=4, states=True),
        Mamba3Case(2, 200, 4, 64, dstate=128, nangles=32, states=True),
    ],
    ids=case_id,
)
def test_the_same_bits_twice(case, dtype, cuda_kernels):
    tensors = case.inputs(dtype, cuda_kernels)
    first, second = (outputs_and_gradients(case.run(mamba3_scan), tensors) for _ in range(2))
    assert all(torch.equal(second[name], value) for name, value in first.items())


@pytest.mark.parametrize("layout", ["heads_first", "slice", "expanded", "last_not_1"])
def test_any_strides(layout, device):
    case = Mamba3Case(3, 75, 4, 20, dstate=12, groups=2, rank=2)
    tensors = case.inputs(torch.float32, device)
    for name in ("Q", "K", "V", "Z", "ADT", "DT", "Trap", "Angles"):
        tensor = tensors[name]
        if layout == "heads_first":
            tensor = tensor.transpose(1, -2).contiguous().transpose(1, -2)
        elif layout == "slice":  # as in a block: parts of one projection
            tensor = torch.cat([tensor, tensor], dim=-1)[..., 1 : 1 + tensor.shape[-1]]
        elif layout == "expanded":
            tensor = tensor[:1].expand(3, *tensor.shape[1:])
        else:
            tensor = tensor.transpose(1, -1).contiguous().transpose(1, -1)
        tensors[name] = tensor
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}
    found, expected = (outputs_and_gradients(case.run(mamba3_scan), given) for given in (tensors, dense))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * value.abs().max().item())


def test_the_same_bits_with_any_number_of_threads():
    case = Mamba3Case(3, 200, 6, 20, dstate=24, groups=2, rank=2, states=True)
    tensors, threads = case.inputs(torch.float32, "cpu"), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3, 3):
            torch.set_num_threads(count)
            results.append(outputs_and_gradients(case.run(mamba3_scan), tensors))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


HAZARDS = {
    "angles": {"Angles": 100.0},
    "infinite angles": {"Angles": float("inf")},
    "no decay": {"ADT": 0.0},
    "all decays at once": {"ADT": -1e4},
    "growth": {"ADT": 0.05},
    "no step": {"DT": 0.0},
    "long steps": {"DT": 100.0},
    "trap open": {"Trap": 100.0},
    "trap shut": {"Trap": -100.0},
    "no K": {"K": 0.0},
    "large biases": {"Q_bias": 100.0, "K_bias": 100.0},
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", HAZARDS)
def test_extreme_values(name, rank, device):
    case = Mamba3Case(1, 130, 2, 8, rank=rank, states=True)
    tensors = case.inputs(torch.float32, device)
    for argument, value in HAZARDS[name].items():
        tensors[argument] = torch.full_like(tensors[argument], value)
    found = outputs_and_gradients(case.run(mamba3_scan), tensors)
    plain = outputs_and_gradients(case.run(mamba3_scan_ref), tensors)
    truth = outputs_and_gradients(case.run(mamba3_scan_ref), tensors, torch.float64)
    for results in (found, plain, truth):
        results.pop("out1")  # an angle may lie on either side of a turn's end
    if name == "infinite angles":  # their slope is 0 times infinity in plain torch
        for results in (found, plain, truth):
            results.pop("dAngles")
    assert_close_to_truth(found, plain, truth, 5e-5)


@pytest.mark.parametrize("least", [-1e30, -torch.inf])
def test_a_step_that_forgets_all(least, device):
    case = Mamba3Case(1, 130, 2, 8, rank=2)
    tensors = case.inputs(torch.float32, device)
    tensors["ADT"][:, ::9] = least
    found = mamba3_scan(**tensors)
    tensors["ADT"][:, ::9] = -1e5
    torch.testing.assert_close(found, mamba3_scan(**tensors), rtol=0, atol=0)


def test_rank_1_is_siso_with_the_entries_of_q_and_k_in_another_order(device):
    case = Mamba3Case(2, 70, 4, 8, dstate=16, nangles=8)
    tensors = case.inputs(torch.float32, device)
    expected = mamba3_scan(**tensors)
    order = torch.arange(16, device=device).view(8, 2).t().flatten()  # neighbours as halves
    for name in ("Q", "K", "Q_bias", "K_bias"):
        tensors[name] = tensors[name][..., order]
    torch.testing.assert_close(mamba3_scan(**tensors, pairwise=False), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(mamba3_scan(**tensors), expected, atol=1e-2)


def test_a_nan_stays_in_its_sequence_and_behind_its_step():
    """On the CPU. In chunks of plain torch it spreads over its chunk."""
    case = Mamba3Case(1, 150, 2, 8, rank=2, cu_seqlens=(0, 40, 110, 150))
    tensors = case.inputs(torch.float32, "cpu")
    clean = case.run(mamba3_scan)(**tensors)
    for name in ("Q", "K", "V", "ADT", "DT", "Trap", "Z"):
        dirty = dict(tensors)
        dirty[name] = tensors[name].clone()
        dirty[name][0, 57] = float("nan")
        out, *states = case.run(mamba3_scan)(**dirty)
        assert torch.equal(out[0, :57], clean[0][0, :57]), name
        assert torch.equal(out[0, 110:], clean[0][0, 110:]), name
        assert out[0, 57].isnan().any()
        for state, other in zip(states, clean[1:], strict=True):
            assert torch.equal(state[[0, 2]], other[[0, 2]])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, device):
    case = Mamba3Case(2, 40, 4, 8, rank=2, norm=True, states=True)
    tensors = case.inputs(torch.float32, device)
    compiled = torch.compile(case.run(mamba3_scan), fullgraph=True, backend=backend)
    expected = outputs_and_gradients(case.run(mamba3_scan), tensors)
    for name, value in outputs_and_gradients(compiled, tensors).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5 * max(1.0, value.abs().max().item()))


@pytest.mark.parametrize("case", [MAMBA3_CASES[6], MAMBA3_CASES[10]], ids=case_id)
def test_opcheck(case):
    tensors = case.inputs(torch.float32, "cpu")
    arguments = [leaf(tensors.get(name)) for name in Inputs._fields]
    torch.library.opcheck(torch.ops.mamba_ssm.mamba3_scan, (*arguments, case.rank == 0, 1e-5, True))


def test_only_inputs_are_kept():
    case = Mamba3Case(1, 300, 4, 32, dstate=64, norm=True)
    tensors = {name: leaf(value) for name, value in case.inputs(torch.float32, "cpu").items()}
    _, kept = output_and_kept(lambda **given: mamba3_scan(**given), tensors)
    assert kept.keys() <= {value.data_ptr() for value in tensors.values() if value is not None}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"V": torch.zeros(1, 9, 2, 4, dtype=torch.float64)},
            TypeError,
            "V must be float32, float16 or bfloat16, got float64",
        ),
        ({"K": torch.zeros(1, 9, 1, 1, 15)}, ValueError, r"K must have shape \(B, L, R, G, N\) = "),
        ({"Q": torch.zeros(1, 9, 1, 3, 16)}, ValueError, "must be a multiple of the number of groups"),
        ({"Angles": torch.zeros(1, 9, 9)}, ValueError, "rotates two of the 16 entries of Q and K, got 9 angles"),
        ({"Trap": torch.zeros(1, 2, 9)}, ValueError, r"Trap must have shape \(B, L, H\)"),
        ({"Q_bias": None}, TypeError, "Q_bias must be a torch.Tensor, got NoneType"),
        ({"initial_states": (torch.zeros(1, 2, 4),) * 3}, ValueError, "must be four tensors or None, got 3"),
        ({"initial_states": (None, torch.zeros(1, 2, 4, 16), None, None)}, ValueError, "got only ssm_state"),
        (
            {"cu_seqlens": torch.tensor([0, 5, 4], dtype=torch.int32)},
            ValueError,
            r"must rise from 0 .* got \[0, 5, 4\]",
        ),
        (
            {"initial_states": tuple(torch.zeros(3, *shape) for shape in ((2, 4), (2, 4, 16), (1, 2, 16), (2, 4)))},
            ValueError,
            r"angle_state must have shape \(U, H, S\) = \(1, 2, 4\)",
        ),
        ({"K": torch.zeros(1, 9, 1, 1, 16).bfloat16()}, TypeError, "K must have the dtype of V, float32, got bfloat16"),
        ({"K": torch.zeros(1, 9, 1, 1, 16, device="meta")}, ValueError, "K must be on cpu like V, got meta"),
        ({"cu_seqlens": torch.tensor([0, 9])}, TypeError, "cu_seqlens must be int32, got int64"),
        ({"seq_idx": torch.zeros(1, 9)}, TypeError, "seq_idx must be int32, got float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors(change, error, message):
    tensors = Mamba3Case(1, 9, 2, 4).inputs(torch.float32, "cpu")
    with pytest.raises(error, match="mamba3_scan: .*" + message):
        mamba3_scan(**{**tensors, **change})
