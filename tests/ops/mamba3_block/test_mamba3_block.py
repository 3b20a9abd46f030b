"""mamba3_block against its float64 reference: values and gradients, memory layouts, what inputs may be, errors."""

from dataclasses import dataclass

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

from mamba_ssm.ops.mamba3_block import mamba3_block, mamba3_block_ref
from mamba_ssm.ops.mamba3_block.block_arguments import Inputs

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
STATES = ("angle_state", "ssm_state", "k_state", "v_state")
# What one result may be off, relative to its largest value, beside twice plain torch's error: sums in another order,
# and in 16 bits that B and C are rounded behind their norm, and their gradients before it.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# On CUDA 16-bit factors go into tensor cores as they are, and states wait for backward in 16 bits.
CUDA_TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Case:
    batch: int
    seqlen: int
    heads: int
    headdim: int
    dstate: int
    angles: int = 0
    groups: int = 1
    rank: int = 0  # 0: SISO
    norm: bool = False
    gate: bool = True
    reduced: bool = True
    D: bool = True
    softplus: bool = False
    A_floor: float = 1e-4
    states: bool = False
    seq_idx: bool = False
    cu_seqlens: tuple = ()

    def inputs(self, dtype, device, seed=0):
        """The tensors of mamba3_block, the initial states by the names of STATES. Values do not depend on dtype."""
        generator = torch.Generator().manual_seed(seed)
        heads, rank, mimo = self.heads, max(self.rank, 1), self.rank > 0
        rows = len(self.cu_seqlens) - 1 if self.cu_seqlens else self.batch
        columns = 2 * heads * self.headdim + 2 * rank * self.groups * self.dstate + 3 * heads + self.angles

        def normal(*shape, dtype=torch.float32, mean=0.0, given=True):
            return (mean + torch.randn(*shape, generator=generator)).to(dtype) if given else None

        tensors = {
            "zxBCdt": normal(self.batch, self.seqlen, columns, dtype=dtype),
            "dt_bias": normal(heads, mean=-2.0),
            "B_weight": normal(self.dstate, dtype=dtype, mean=1.0),
            "C_weight": normal(self.dstate, dtype=dtype, mean=1.0),
            "B_bias": normal(heads, rank, self.dstate),
            "C_bias": normal(heads, rank, self.dstate),
            "D": normal(heads, given=self.D),
            "mimo_x": normal(heads, rank, self.headdim, given=mimo),
            "mimo_z": normal(heads, rank, self.headdim, given=mimo and self.gate),
            "mimo_o": normal(heads, rank, self.headdim, given=mimo and self.reduced),
            "norm_weight": normal(heads * self.headdim, given=self.norm),
        }
        if self.states:
            tensors["angle_state"] = 6 * torch.rand(rows, heads, self.angles, generator=generator)
            tensors["ssm_state"] = normal(rows, heads, self.headdim, self.dstate)
            tensors["k_state"] = normal(rows, rank, heads, self.dstate)
            tensors["v_state"] = normal(rows, heads, self.headdim)
        if self.seq_idx:
            starts = torch.rand(self.batch, self.seqlen, generator=generator) < 0.1
            tensors["seq_idx"] = starts.cumsum(1).to(torch.int32)
        if self.cu_seqlens:
            tensors["cu_seqlens"] = torch.tensor(self.cu_seqlens, dtype=torch.int32)
        return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}

    @property
    def options(self):
        names = {"headdim": self.headdim, "ngroups": self.groups, "gate": self.gate, "pairwise": self.rank == 0}
        return {**names, "A_floor": self.A_floor, "A_softplus": self.softplus}

    def run(self, function):
        """function's output and the four final states, as a function of inputs() by name."""

        def call(**tensors):
            states = tuple(tensors.pop(name, None) for name in STATES)
            states = None if states[0] is None else states
            out, finals = function(**tensors, **self.options, initial_states=states, return_final_states=True)
            return (out, *finals)

        return call


CASES = (
    Case(2, 70, 4, 8, 16, 4),
    Case(1, 1, 1, 1, 1, states=True),
    Case(3, 0, 2, 5, 8, 2, states=True),
    Case(0, 5, 2, 5, 8, 2),
    Case(2, 40, 6, 8, 16, 4, groups=3, norm=True, states=True),
    Case(2, 67, 4, 5, 7, 3, groups=2, softplus=True),  # no vectors, a last entry without a partner
    Case(1, 40, 2, 65, 132, 66, A_floor=1.5),
    Case(1, 33, 70, 2, 8, 2, D=False),  # more heads than a warp takes
    Case(1, 19, 300, 1, 4, 1),
    Case(2, 33, 4, 64, 128, 32, rank=4, states=True),
    Case(2, 33, 4, 16, 64, 32, rank=4, groups=2, norm=True, softplus=True),
    Case(1, 40, 2, 20, 40, 10, rank=8, gate=False, reduced=False),
    Case(1, 30, 2, 20, 37, 10, rank=1, gate=False, D=False),
    Case(2, 75, 4, 8, 16, 4, seq_idx=True),
    Case(1, 150, 4, 64, 128, 32, cu_seqlens=(0, 64, 64, 65, 67, 140), states=True),  # steps behind the last
    Case(1, 50, 2, 8, 16, 4, rank=3, cu_seqlens=(0, 1, 16, 16, 33, 50), norm=True),
    Case(2, 130, 4, 64, 128, 32),
    Case(1, 70, 2, 256, 256, 128, norm=True),
    # rows at multiples of 16 bytes, which Hopper's own kernels need
    Case(2, 130, 8, 64, 128, 32, states=True),
    Case(1, 70, 8, 64, 128, 32, rank=4, groups=2),
)


def check(case, tensors, tolerance):
    dtype = tensors["zxBCdt"].dtype
    found = outputs_and_gradients(case.run(mamba3_block), tensors)
    plain = outputs_and_gradients(case.run(mamba3_block_ref), tensors)
    truth = outputs_and_gradients(case.run(mamba3_block_ref), tensors, torch.float64)
    assert found["out0"].dtype == dtype
    for results in (found, plain, truth):  # an angle may lie on either side of a turn's end
        results["out1"] = torch.stack([torch.cos(results["out1"]), torch.sin(results["out1"])])
    for name, value in found.items():  # of an input without an effect torch has no gradient, or zeros
        plain.setdefault(name, torch.zeros_like(value))
        truth.setdefault(name, torch.zeros_like(value))
    assert_close_to_truth(found, plain, truth, tolerance[dtype])


@by_turns.parameters(CASES)
def test_values_and_gradients(case, dtype, device, kernels):
    check(case, case.inputs(dtype, device), CUDA_TOLERANCE if kernels == "cuda" else TOLERANCE)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: "weight_" + dtype_id(dtype))
def test_parameters_of_other_dtypes(weight_dtype, device, kernels):
    """As autocast and .to() make them; the weights of B and C even apart from each other."""
    case = Case(2, 40, 4, 8, 16, 4, groups=2, rank=2, norm=True)
    tensors = case.inputs(torch.bfloat16, device)
    narrow = {name: value.to(weight_dtype) for name, value in tensors.items() if name not in ("zxBCdt", "C_weight")}
    grads = outputs_and_gradients(case.run(mamba3_block), {**tensors, **narrow})
    assert all(grads[f"d{name}"].dtype == weight_dtype for name in narrow)
    check(case, {**tensors, **narrow}, CUDA_TOLERANCE if kernels == "cuda" else TOLERANCE)


@pytest.mark.parametrize("layout", ["slice", "expanded", "time_first", "columns"])
def test_strided_views(layout, device):
    case = Case(3, 40, 4, 8, 16, 4)
    tensors = case.inputs(torch.float32, device)
    zxBCdt = tensors["zxBCdt"]
    strided = {
        "slice": lambda: torch.cat([zxBCdt, zxBCdt], dim=2)[..., 1 : 1 + zxBCdt.shape[2]],
        "expanded": lambda: zxBCdt[:1].expand(zxBCdt.shape),
        "time_first": lambda: zxBCdt.transpose(0, 1).contiguous().transpose(0, 1),
        "columns": lambda: zxBCdt.transpose(1, 2).contiguous().transpose(1, 2),
    }[layout]()
    others = {"B_bias": tensors["B_bias"].transpose(0, 2).contiguous().transpose(0, 2)}
    given = {**tensors, **others, "zxBCdt": strided}
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in given.items()}
    found, expected = (outputs_and_gradients(case.run(mamba3_block), values) for values in (given, dense))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * value.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_the_same_bits_twice_and_with_any_number_of_threads(dtype, device):
    case = Case(3, 120, 6, 20, 24, 12, groups=2, rank=2, norm=True, states=True)
    tensors, threads = case.inputs(dtype, device), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3, 3):
            torch.set_num_threads(count)
            results.append(outputs_and_gradients(case.run(mamba3_block), tensors))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


@pytest.mark.parametrize("A", [0.0, -1e4, 1e4, -1e38, 1e30, float("-inf")])
@pytest.mark.parametrize("softplus", [False, True])
def test_extreme_rates(A, softplus, device):
    """At 0 the activation has its bend; far below it only the floor is left, far above it the state is forgotten."""
    case = Case(1, 30, 4, 8, 16, 4, softplus=softplus)
    tensors = case.inputs(torch.float32, device)
    tensors["zxBCdt"][..., 100:104] = A
    check(case, tensors, {torch.float32: 5e-5})


@pytest.mark.parametrize(("A", "A_floor"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 0.5)])
def test_rates_at_their_floor(A, A_floor, device):
    """The rate is the floor, where its derivative is still the activation's."""
    case = Case(1, 30, 4, 8, 16, 4, A_floor=A_floor)
    tensors = case.inputs(torch.float32, device)
    tensors["zxBCdt"][..., 100:104] = A
    found = outputs_and_gradients(case.run(mamba3_block), tensors)
    # The first step has no state to decay: its gradient is zero, but for rounding.
    assert found["dzxBCdt"][:, 1:, 100:104].abs().min() > 0
    check(case, tensors, {torch.float32: 5e-5})


def test_a_nan_stays_in_its_row(device):
    case = Case(2, 20, 4, 8, 16, 4)
    tensors = case.inputs(torch.float32, device)
    for column in (64, 96, 100):  # B, dt, A
        dirty = {**tensors, "zxBCdt": tensors["zxBCdt"].clone()}
        dirty["zxBCdt"][0, 7, column] = float("nan")
        out = case.run(mamba3_block)(**dirty)[0]
        assert out[0, 7:].isnan().any()
        assert not out[1].isnan().any()


def test_only_inputs_are_kept():
    case = Case(1, 300, 4, 32, 64, 16, norm=True)
    tensors = {name: leaf(value) for name, value in case.inputs(torch.float32, "cpu").items()}
    _, kept = output_and_kept(lambda **given: mamba3_block(**given, **case.options), tensors)
    assert kept.keys() <= {value.data_ptr() for value in tensors.values() if value is not None}


def test_no_heads(device):
    tensors = [
        torch.ones(shape, device=device, requires_grad=True) for shape in ((1, 4, 20), 0, 8, 8, (0, 1, 8), (0, 1, 8))
    ]
    mamba3_block(*tensors, headdim=8).sum().backward()
    assert not any(tensor.grad.any() for tensor in tensors)


def test_gradients_of_final_states_alone(device):
    case = Case(2, 30, 2, 8, 16, 4, states=True)
    tensors = case.inputs(torch.float32, device)
    found, expected = (
        outputs_and_gradients(lambda function=function, **given: case.run(function)(**given)[2:], tensors)
        for function in (mamba3_block, mamba3_block_ref)
    )
    for name, value in found.items():
        other = expected.get(name, torch.zeros_like(value))
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5 * max(1.0, value.abs().max().item()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, device):
    case = Case(2, 40, 4, 8, 16, 4, rank=2, norm=True, states=True)
    tensors = case.inputs(torch.float32, device)
    compiled = torch.compile(case.run(mamba3_block), fullgraph=True, backend=backend)
    expected = outputs_and_gradients(case.run(mamba3_block), tensors)
    for name, value in outputs_and_gradients(compiled, tensors).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5 * max(1.0, value.abs().max().item()))


@pytest.mark.parametrize("case", [CASES[4], CASES[11], CASES[15]], ids=case_id)
@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck(case):
    tensors = case.inputs(torch.float32, "cpu")
    arguments = [leaf(tensors.get(name)) for name in Inputs._fields]
    options = case.headdim, case.groups, case.A_floor, case.softplus, 1e-5, 1e-5, 1e-5, case.gate, case.rank == 0
    torch.library.opcheck(torch.ops.mamba_ssm.mamba3_block, (*arguments, *options, True))


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("zxBCdt", lambda t: t[..., :104], ValueError, "must have 2 H P .* 108 without the S angles .* got 104"),
        ("zxBCdt", lambda t: t[0], ValueError, "zxBCdt must have 3 dimensions"),
        ("zxBCdt", lambda t: t.double(), TypeError, "zxBCdt must be float32, float16 or bfloat16, got float64"),
        ("zxBCdt", lambda t: t.repeat(1, 1, 2), ValueError, "rotates two of the 16 entries of B and C, got 116 angles"),
        ("dt_bias", lambda t: t[1:], ValueError, r"dt_bias must have shape \(H,\)"),
        ("dt_bias", lambda t: None, TypeError, "dt_bias must be a torch.Tensor, got NoneType"),
        ("B_weight", lambda t: t[1:], ValueError, r"B_weight must have shape \(N,\)"),
        ("C_weight", lambda t: t.double(), TypeError, "C_weight must be float32, float16 or bfloat16"),
        ("C_bias", lambda t: t[:, :0], ValueError, r"C_bias must have shape \(H, R, N\)"),
        ("norm_weight", lambda t: t[1:], ValueError, r"norm_weight must have shape \(H P,\)"),
        ("ngroups", lambda n: 3, ValueError, r"nheads \(4\) must be a multiple"),
        ("headdim", lambda n: 257, ValueError, "headdim"),
        ("headdim", lambda n: 8.0, TypeError, "headdim must be an integer, got 8.0"),
        ("initial_states", lambda n: (torch.zeros(2, 4, 4),) * 3, ValueError, "must be four tensors or None, got 3"),
        ("cu_seqlens", lambda n: torch.tensor([0, 9]), ValueError, "zxBCdt must have batch 1, got 2"),
    ],
)
def test_wrong_arguments(name, change, error, words):
    case = Case(2, 9, 4, 8, 16, 4, norm=True)
    arguments = {**case.inputs(torch.float32, "cpu"), **case.options}
    arguments[name] = change(arguments.get(name))
    with pytest.raises(error, match=words):
        mamba3_block(**arguments)
