"""mamba_chunk_scan_combined: values and gradients against the float64 reference, memory layouts, and options."""

import pytest
import torch
from _helpers import by_turns
from _helpers.cases import (
    DTYPES,
    SSD_CASES,
    SsdCase,
    assert_close_to_truth,
    case_id,
    dtype_id,
    leaf,
    outputs_and_gradients,
)

from mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    ssd_chunk_scan_combined_ref,
)
from mamba_ssm.utils import kernels

# What one result may be off, relative to its largest value, beside twice plain torch's error.
# float32: sums in another order. 16 bits: with z, backward rounds the gradient before the gate to the dtype; on the GPU
# tensor cores also take states and decayed products rounded to the dtype (half an ulp: 2^-11 and 2^-8).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def scan(function, case):
    def run(**tensors):
        return function(**tensors, **case.options(), return_final_states=True)

    return run


def check(case, dtype, device, tensors=None, atol=None):
    tensors = tensors or case.inputs(dtype, device)
    found = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    plain = outputs_and_gradients(scan(ssd_chunk_scan_combined_ref, case), tensors)
    truth = outputs_and_gradients(scan(ssd_chunk_scan_combined_ref, case), tensors, torch.float64)
    assert found["out0"].dtype == dtype
    assert found["out1"].dtype == torch.float32
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype] if atol is None else atol)


def assert_same(found, expected, dtype):
    """Two runs of the kernels on the same values: sums may be in another order, results rounded the other way."""
    for name, value in expected.items():
        limit = TOLERANCE[dtype] * max(value.abs().max().item(), 1e-3) if value.numel() else 0
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", SSD_CASES, ids=case_id)
def test_values_and_gradients(case, dtype, device):
    check(case, dtype, device)


# CUDA splits these: whole segments and a shorter last one, a state that enters the first, and runs that end in some.
SPLIT_CASES = (
    SsdCase(1, 1025, 2, 64, dstate=128, initial_states=True),
    SsdCase(1, 1590, 1, 64, dstate=256, initial_states=True),
    SsdCase(1, 1500, 2, 64, dstate=64, seq_idx=True, z=True),
    SsdCase(1, 3000, 2, 40, dstate=16, initial_states=True, seq_idx=True),
    SsdCase(1, 405, 1, 64, dstate=256, initial_states=True),  # as 1590, in float32: its chunks are a quarter
)


@by_turns.parameters(SPLIT_CASES, for_cuda=True)
def test_split_lengths(case, dtype, device):
    check(case, dtype, device)


# What a Hopper GPU runs only of unaligned rows, or never; all other GPUs always.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    "case",
    [
        SsdCase(1, 130, 4, 72, dstate=100, groups=2, D="dim", z=True, initial_states=True),
        SsdCase(1, 150, 2, 33, dstate=200, seq_idx=True),
    ],
    ids=case_id,
)
def test_kernels_without_warpgroups(case, dtype, cuda_kernels):
    tables = ("ssd_forward", "ssd_backward")
    rows = [row.id for row in kernels.kernels() if row.op in tables and row.architecture == 90]
    with kernels.without(*rows), kernels.launched() as found:
        check(case, dtype, cuda_kernels)
    assert found and not {one.kernel.id for one in found}.intersection(rows)


# 16 bits and rows at multiples of 16 bytes run other CUDA kernels on Hopper than the same rows elsewhere.
@pytest.mark.parametrize("dtype,headdim,dstate", [(torch.float32, 20, 12), (torch.bfloat16, 64, 64)], ids=str)
@pytest.mark.parametrize("layout", ["heads_first", "slice", "unaligned", "expanded", "last_not_1"])
def test_any_strides(layout, dtype, headdim, dstate, device):
    case = SsdCase(2, 75, 4, headdim, dstate=dstate, groups=2, z=True)
    tensors = case.inputs(dtype, device)
    for name in ("x", "dt", "z", "B", "C"):
        tensor = tensors[name]
        if layout == "heads_first":
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "slice":  # as in a Mamba-2 block: parts of one projection
            tensor = torch.cat([tensor, tensor], dim=2)[:, :, tensor.shape[2] :]
        elif layout == "unaligned":
            tensor = torch.cat([tensor, tensor], dim=-1)[..., 1 : 1 + tensor.shape[-1]]
        elif layout == "expanded":
            tensor = tensor[:1].expand(2, *tensor.shape[1:])
        else:
            tensor = tensor.transpose(1, -1).contiguous().transpose(1, -1)
        tensors[name] = tensor
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}
    strided = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    assert_same(strided, outputs_and_gradients(scan(mamba_chunk_scan_combined, case), dense), dtype)


def test_strided_gradients_of_the_output(device):
    case = SsdCase(2, 70, 4, 20)
    tensors = case.inputs(torch.float32, device)
    for name in ("x", "B", "D"):
        tensors[name].requires_grad_()
    out = mamba_chunk_scan_combined(**tensors, **case.options())
    weights = torch.randn_like(out)
    wanted = [tensors[name] for name in ("x", "B", "D")]
    expected = torch.autograd.grad(out, wanted, weights, retain_graph=True)
    for strided in (
        weights.transpose(1, 3).contiguous().transpose(1, 3),
        weights.transpose(0, 2).clone().transpose(0, 2),
    ):
        for grad, other in zip(torch.autograd.grad(out, wanted, strided, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(grad, other)
    ones = torch.ones((), device=device).expand(out.shape)  # what .sum() sends back
    torch.autograd.grad(out, wanted, ones)


def test_arguments_by_position(device):
    tensors = SsdCase(2, 40, 4, 8, D="dim", z=True, initial_states=True, seq_idx=True).inputs(torch.float32, device)
    names = ("D", "z", "dt_bias", "initial_states", "seq_idx")
    first = [tensors[name] for name in ("x", "dt", "A", "B", "C")]
    rest = [tensors[name] for name in names]
    results = mamba_chunk_scan_combined(*first, 64, *rest, None, True, (0.1, 0.5), True, False, torch.bfloat16)
    expected = mamba_chunk_scan_combined(
        **tensors, chunk_size=8, dt_softplus=True, dt_limit=(0.1, 0.5), return_final_states=True
    )
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1].bfloat16())
    alone = mamba_chunk_scan_combined(**tensors, chunk_size=8, dt_softplus=True, dt_limit=(0.1, 0.5))
    assert torch.equal(alone, expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_narrow_parameters_are_widened(dtype, device):
    tensors = SsdCase(2, 40, 4, 8, D="dim", initial_states=True).inputs(dtype, device)
    narrow = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    wide = dict(narrow)
    for name in ("A", "D", "dt_bias", "initial_states"):
        wide[name] = narrow[name].float()
    run = scan(mamba_chunk_scan_combined, SsdCase(2, 40, 4, 8))
    found, expected = outputs_and_gradients(run, narrow), outputs_and_gradients(run, wide)
    for name, value in found.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
        if name.startswith("d"):
            assert value.dtype == narrow[name[1:]].dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_calls_chained_through_the_states(dtype, device):
    tensors = SsdCase(2, 150, 4, 20, dstate=24).inputs(dtype, device)
    whole, whole_states = mamba_chunk_scan_combined(**tensors, chunk_size=64, return_final_states=True)
    states, parts = None, []
    for part in (slice(0, 1), slice(1, 65), slice(65, 128), slice(128, 150)):
        piece = {**tensors, "initial_states": states}
        for name in ("x", "dt", "B", "C"):
            piece[name] = tensors[name][:, part]
        out, states = mamba_chunk_scan_combined(**piece, chunk_size=64, return_final_states=True)
        parts.append(out)
    assert_same({"out": torch.cat(parts, dim=1), "states": states}, {"out": whole, "states": whole_states}, dtype)


@pytest.mark.parametrize("sizes", [(0, 8, 4), (2, 0, 4), (2, 8, 0)], ids=["no_batch", "no_steps", "no_heads"])
def test_empty_sizes(sizes, device):
    case = SsdCase(*sizes, 5, initial_states=True)
    results = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), case.inputs(torch.float32, device))
    truth = outputs_and_gradients(scan(ssd_chunk_scan_combined_ref, case), case.inputs(torch.float32, device))
    assert results["out0"].shape == (*sizes, 5)
    for name, value in results.items():
        torch.testing.assert_close(value, truth.get(name, torch.zeros_like(value)))


@pytest.mark.parametrize("seq_idx", [False, True])
def test_only_the_final_states_are_used(seq_idx, device):
    case = SsdCase(2, 150, 4, 20, initial_states=True, seq_idx=seq_idx)
    tensors = case.inputs(torch.float32, device)

    def final_states(function):
        return lambda **t: function(**t, **case.options(), return_final_states=True)[1]

    found = outputs_and_gradients(final_states(mamba_chunk_scan_combined), tensors)
    truth = outputs_and_gradients(final_states(ssd_chunk_scan_combined_ref), tensors)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_gradient_of_some_arguments_only(device):
    tensors = SsdCase(2, 70, 4, 8).inputs(torch.float32, device)
    tensors["A"].requires_grad_()
    mamba_chunk_scan_combined(**tensors, chunk_size=64).sum().backward()
    assert tensors["A"].grad is not None
    assert tensors["x"].grad is None


def test_strong_decay_keeps_its_accuracy(device, kernels):
    """Exponents are sums over a chunk, here of thousands: between near steps they must still differ as they should."""
    case = SsdCase(1, 128, 2, 16, D="", dt_bias=False, softplus=False)
    for seed in range(3) if kernels == "cpu" else [0]:
        tensors = case.inputs(torch.float32, device, seed=seed)
        tensors["A"] = torch.tensor([-400.0, -30.0], device=device)
        # the CPU adds up what belongs to dA alone
        check(case, torch.float32, device, tensors, 1e-6 if kernels == "cpu" else None)
    quiet = slice(40, 64)  # after them hardly anything decays
    tensors["dt"][:, quiet] = 1e-3
    out = mamba_chunk_scan_combined(**tensors, **case.options())[:, quiet]
    plain = ssd_chunk_scan_combined_ref(**tensors, **case.options())[:, quiet]
    wide = {name: None if t is None else t.double() for name, t in tensors.items()}
    truth = ssd_chunk_scan_combined_ref(**wide, **case.options())[:, quiet]
    assert_close_to_truth({"out": out}, {"out": plain}, {"out": truth})


def test_nan_stays_in_its_head_and_on_its_side_of_time():
    """The CPU multiplies nothing by a masked zero; tensor cores do, within a tile or a chunk."""
    tensors = SsdCase(1, 150, 4, 20).inputs(torch.float32, "cpu")
    tensors["x"][0, 70, 2, 5] = float("nan")
    out = mamba_chunk_scan_combined(**tensors, chunk_size=64)
    assert out[0, 70:, 2, 5].isnan().all()
    out[0, 70:, 2, 5] = 0
    assert out.isfinite().all()
    tensors["B"][0, 80, 0, 3] = float("nan")
    assert mamba_chunk_scan_combined(**tensors, chunk_size=64)[0, :70].isfinite().all()


@pytest.mark.parametrize("heads,headdim", [(4, 64), (1, 200)], ids=["heads", "parts_of_a_head"])
def test_results_do_not_depend_on_threads(heads, headdim):
    case = SsdCase(3, 500, heads, headdim, dstate=64, D="dim", initial_states=True)
    tensors = case.inputs(torch.float32, "cpu")
    alone = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    torch.set_num_threads(3)
    for name, value in outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors).items():
        assert torch.equal(value, alone[name]), name


@pytest.mark.parametrize("groups", [1, 3])
def test_states_of_more_heads_than_the_cpu_works_on_together(groups, device):
    """Backward on the CPU takes 10 of these 12 heads, then 2: gradients of B and C go on where they stopped."""
    case = SsdCase(2, 150, 12, 256, dstate=256, groups=groups, initial_states=True, seq_idx=True)
    tensors = case.inputs(torch.float32, device)
    found = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    plain = outputs_and_gradients(scan(mamba_chunk_scan, case), tensors)
    truth = outputs_and_gradients(scan(mamba_chunk_scan, case), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth, TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,dstate,heads", [(torch.float16, 256, 40), (torch.bfloat16, 128, 72)], ids=str)
def test_states_of_more_heads_than_one_launch_takes(dtype, dstate, heads, cuda_kernels):
    """Backward on CUDA takes these in two launches: the gradients of B and C go on where the first one stopped."""
    case = SsdCase(2, 1030, heads, 8, dstate=dstate)
    tensors = case.inputs(dtype, cuda_kernels)
    weights = torch.randn_like(tensors["x"])

    def gradients(part):
        of_heads = {name: tensors[name][:, :, part] for name in ("x", "dt")}
        of_heads |= {name: tensors[name][part] for name in ("A", "D", "dt_bias")}
        leaves = {name: leaf(tensor) for name, tensor in ({"B": tensors["B"], "C": tensors["C"]} | of_heads).items()}
        out = mamba_chunk_scan_combined(**leaves, **case.options())
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights[:, :, part]), strict=True))

    found = gradients(slice(None))
    first, second = gradients(slice(0, 16)), gradients(slice(16, None))
    expected = {name: first[name].float() + second[name].float() for name in ("B", "C")}
    expected |= {name: torch.cat((first[name], second[name]), 2).float() for name in ("x", "dt")}
    expected |= {name: torch.cat((first[name], second[name])) for name in ("A", "D", "dt_bias")}
    assert_same({name: value.float() for name, value in found.items()}, expected, dtype)


def test_deterministic(device):
    case = SsdCase(2, 500, 8, 64, dstate=64, D="dim")
    tensors = case.inputs(torch.bfloat16, device)
    first = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    for name, value in outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors).items():
        assert torch.equal(value, first[name]), name


def test_only_inputs_are_kept_for_backward(device):
    case = SsdCase(2, 150, 4, 20, z=True, initial_states=True)
    tensors = {name: t.requires_grad_() for name, t in case.inputs(torch.float32, device).items() if t is not None}
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mamba_chunk_scan_combined(**tensors, **case.options())
    inputs = {tensor.data_ptr() for tensor in tensors.values()}
    assert {tensor.data_ptr() for tensor in saved} <= inputs


def test_states_that_are_not_float32(device):
    case = SsdCase(2, 40, 4, 8)
    tensors = case.inputs(torch.bfloat16, device)
    _, states = mamba_chunk_scan_combined(**tensors, **case.options(), return_final_states=True)
    for dtype in (torch.bfloat16, torch.float64):
        _, other = mamba_chunk_scan_combined(
            **tensors, **case.options(), return_final_states=True, state_dtype=dtype
        )  # fmt: skip
        assert torch.equal(other, states.to(dtype))


def test_step_sizes_at_their_limits(device):
    """At a limit the derivative of dt is still 1."""
    case = SsdCase(2, 70, 4, 16, dt_bias=False, softplus=False, dt_limit=(0.25, 0.5))
    tensors = case.inputs(torch.float32, device)
    tensors["dt"] = torch.full_like(tensors["dt"], 0.25)
    tensors["dt"][:, ::2] = 0.5
    found = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    assert found["ddt"].abs().min() > 0
    check(case, torch.float32, device, tensors)
