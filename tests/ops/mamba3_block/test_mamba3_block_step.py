"""mamba3_block_step against its reference: outputs and the four states, step after step."""

from dataclasses import dataclass

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, case_id, dtype_id

from mamba_ssm.ops.mamba3_block import mamba3_block_step, mamba3_block_step_ref
from mamba_ssm.ops.mamba3_scan import States

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
STATES = ("angle", "ssm", "k", "v")


@dataclass(frozen=True)
class Case:
    batch: int
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

    def inputs(self, dtype, state_dtype, weight_dtype, device):
        """Arguments and options of mamba3_block_step, the states under their names."""
        heads, rank, mimo = self.heads, max(self.rank, 1), self.rank > 0
        matrix = rank * self.groups * self.dstate
        columns = 2 * heads * self.headdim + 2 * matrix + 3 * heads + self.angles

        def normal(*shape, dtype=weight_dtype, shift=0.0, given=True):
            return (torch.randn(*shape) + shift).to(device, dtype) if given else None

        return {
            "zxBCdt": normal(self.batch, columns, dtype=dtype),
            "angle": 6 * torch.rand(self.batch, heads, self.angles, device=device),
            "ssm": normal(self.batch, heads, self.headdim, self.dstate, dtype=state_dtype),
            "k": normal(self.batch, rank, heads, self.dstate, dtype=state_dtype),
            "v": normal(self.batch, heads, self.headdim, dtype=state_dtype),
            "dt_bias": normal(heads, shift=-2.0),
            "B_weight": normal(self.dstate, shift=1.0),
            "C_weight": normal(self.dstate, shift=1.0),
            "B_bias": normal(heads, rank, self.dstate),
            "C_bias": normal(heads, rank, self.dstate),
            "D": normal(heads, given=self.D),
            "mimo_x": normal(heads, rank, self.headdim, given=mimo),
            "mimo_z": normal(heads, rank, self.headdim, given=mimo and self.gate),
            "mimo_o": normal(heads, rank, self.headdim, given=mimo and self.reduced),
            "norm_weight": normal(heads * self.headdim, given=self.norm),
            "ngroups": self.groups,
            "A_floor": self.A_floor,
            "A_softplus": self.softplus,
            "gate": self.gate,
            "pairwise": not mimo,
        }


CASES = (
    Case(2, 4, 64, 128, 32),
    Case(1, 1, 1, 1),
    Case(3, 6, 8, 16, 4, groups=3, norm=True),
    Case(2, 4, 5, 7, 3, groups=2, softplus=True),  # no vectors, a last entry without a partner
    Case(2, 2, 256, 256, 128, norm=True),
    Case(1, 2, 65, 132, 66, A_floor=2.0),
    Case(2, 3, 48, 96, 24, groups=3, D=False),
    Case(2, 4, 64, 128, 32, rank=4),
    Case(2, 4, 16, 64, 32, rank=4, groups=2, norm=True),
    Case(1, 2, 85, 104, 26, rank=4, gate=False, reduced=False),  # six tiles of products, two of them not full
    Case(2, 2, 33, 24, 12, rank=3, softplus=True),
    Case(2, 2, 8, 37, 18, rank=1, norm=True),
    Case(1, 2, 20, 40, 10, rank=8, gate=False, reduced=False),
    Case(1, 1, 70, 200, 50, rank=5, gate=False, D=False),
    Case(1, 2, 20, 64, 16, rank=33),  # rows of ranks that take turns
    Case(2, 3, 12, 20, gate=False),
)


def run(function, arguments, dtype=None, steps=3):
    """Some steps one after the other, each on a rotation of the same rows."""
    arguments = {
        name: value.to(dtype) if dtype and isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    states = States(*(arguments.pop(name).clone() for name in STATES))
    zxBCdt = arguments.pop("zxBCdt")
    outs = [function(zxBCdt.roll(step, 1), states, **arguments) for step in range(steps)]
    turns = {"cos": torch.cos(states.angle), "sin": torch.sin(states.angle)}
    return {"out": torch.stack(outs), **turns, "ssm": states.ssm, "k": states.k, "v": states.v}


def compare(arguments, steps=3):
    found = run(mamba3_block_step, arguments, steps=steps)
    assert found["out"].dtype == arguments["zxBCdt"].dtype
    plain = run(mamba3_block_step_ref, arguments, steps=steps)
    assert_close_to_truth(found, plain, run(mamba3_block_step_ref, arguments, torch.float64, steps))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_reference(case, dtype, device):
    compare(case.inputs(dtype, dtype, dtype, device))


@pytest.mark.parametrize("ssm_dtype", (torch.float32, torch.bfloat16), ids=dtype_id)
@pytest.mark.parametrize("rank", (0, 4))
def test_dtypes_of_a_layer(rank, ssm_dtype, device):
    """A bfloat16 layer's parameters, but norms, are float32; so may its state be. CUDA has kernels for these dtypes."""
    arguments = Case(2, 3, 72, 112, 28, rank=rank).inputs(torch.bfloat16, torch.bfloat16, torch.float32, device)
    arguments["ssm"] = arguments["ssm"].to(ssm_dtype)
    for name in ("B_weight", "C_weight"):
        arguments[name] = arguments[name].bfloat16()
    compare(arguments)


@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: "state_" + dtype_id(dtype))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: "weight_" + dtype_id(dtype))
def test_mixed_dtypes(state_dtype, weight_dtype, device):
    """As autocast and caches of their own dtype make them; parameters of two dtypes, as constructors do."""
    arguments = Case(2, 4, 8, 16, 4, groups=2, rank=2, norm=True).inputs(
        torch.bfloat16, state_dtype, weight_dtype, device
    )
    compare(arguments)
    compare({**arguments, "D": arguments["D"].float(), "norm_weight": arguments["norm_weight"].half()})


def test_strided_views(device):
    arguments = Case(3, 4, 8, 16, 4).inputs(torch.float32, torch.float32, torch.float32, device)
    expected = run(mamba3_block_step, arguments)
    zxBCdt = arguments["zxBCdt"]
    strided = {
        **arguments,
        "zxBCdt": torch.cat([zxBCdt, zxBCdt], dim=1)[:, : zxBCdt.shape[1]],
        "D": torch.stack([arguments["D"]] * 2, dim=1)[:, 0],
        "B_bias": arguments["B_bias"].transpose(0, 2).contiguous().transpose(0, 2),
    }
    torch.testing.assert_close(run(mamba3_block_step, strided), expected, rtol=0, atol=0)
    columns = {**arguments, "zxBCdt": zxBCdt.T.contiguous().T}
    torch.testing.assert_close(run(mamba3_block_step, columns, steps=1)["out"][0], expected["out"][0], rtol=0, atol=0)
    states = States(*(arguments[name].transpose(0, -1).contiguous().transpose(0, -1) for name in STATES))
    others = {name: value for name, value in arguments.items() if name not in (*STATES, "zxBCdt")}
    mamba3_block_step(zxBCdt, states, **others)
    for name, found in zip(STATES[1:], states[1:], strict=True):
        torch.testing.assert_close(found, run(mamba3_block_step, arguments, steps=1)[name], rtol=0, atol=0)


def test_a_batch_is_its_rows(device):
    arguments = Case(40, 8, 64, 16, 4).inputs(torch.float32, torch.float32, torch.float32, device)
    together = run(mamba3_block_step, arguments, steps=1)
    alone = run(
        mamba3_block_step, {**arguments, **{name: arguments[name][7:8] for name in ("zxBCdt", *STATES)}}, steps=1
    )
    for name in ("ssm", "k", "v"):
        assert torch.equal(together[name][7:8], alone[name])
    assert torch.equal(together["out"][:, 7:8], alone["out"])


def test_no_batch(device):
    arguments = Case(0, 4, 8, 16, 4).inputs(torch.float32, torch.float32, torch.float32, device)
    assert run(mamba3_block_step, arguments, steps=1)["out"].shape == (1, 0, 1, 4, 8)


@pytest.mark.parametrize("place", ["A", "dt", "angles", "B"])
def test_a_nan_stays_in_its_row(place, device):
    arguments = Case(2, 4, 8, 16, 4).inputs(torch.float32, torch.float32, torch.float32, device)
    column = {"B": 2 * 32, "dt": 2 * 32 + 2 * 16, "A": 2 * 32 + 2 * 16 + 4, "angles": 2 * 32 + 2 * 16 + 3 * 4}[place]
    arguments["zxBCdt"][0, column] = float("nan")
    out = run(mamba3_block_step, arguments, steps=1)["out"][0]
    assert out[0, :, 0].isnan().all()
    assert not out[1].isnan().any()
    if place in ("A", "dt"):  # which are a head's own
        assert not out[0, :, 1:].isnan().any()


@pytest.mark.parametrize("A", [0.0, -1e4, 1e4, -1e38, 1e38, float("-inf")])
def test_extreme_rates(A, device):
    """At 0 the activation has its bend; far below it only the floor is left, far above it the state is forgotten."""
    arguments = Case(2, 4, 8, 16, 4).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments["zxBCdt"][:, 2 * 32 + 2 * 16 + 4 : 2 * 32 + 2 * 16 + 8] = A
    compare(arguments, steps=1)


@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=case_id)
@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck(case, device):
    arguments = case.inputs(torch.float32, torch.float32, torch.float32, device)
    tensors = [value for value in arguments.values() if value is None or isinstance(value, torch.Tensor)]
    options = case.groups, case.A_floor, case.softplus, 1e-5, 1e-5, 1e-5, case.gate, case.rank == 0
    torch.library.opcheck(torch.ops.mamba_ssm.mamba3_block_step.default, (*tensors, *options))


@pytest.mark.parametrize(
    "name,change,error,words",
    [
        ("zxBCdt", lambda t: t[:, 1:], ValueError, "zxBCdt must have 2 H P .* = 112 columns .* got 111"),
        ("zxBCdt", lambda t: t.double(), TypeError, "zxBCdt must be float32, float16 or bfloat16, got float64"),
        ("angle", lambda t: t.half(), TypeError, "angle_state must be float32, got float16"),
        ("angle", lambda t: torch.zeros(2, 4, 9), ValueError, "rotates two of the 16 entries of B and C, got 9 angles"),
        ("ssm", lambda t: t[:1], ValueError, r"ssm_state must have shape \(B, H, P, N\)"),
        ("k", lambda t: t[:, :0], ValueError, r"k_state must have shape \(B, R, H, N\)"),
        ("v", lambda t: t[:, :1].expand(t.shape), ValueError, "v_state is written in place"),
        ("dt_bias", lambda t: t[1:], ValueError, r"dt_bias must have shape \(H,\)"),
        ("B_weight", lambda t: t[1:], ValueError, r"B_weight must have shape \(N,\)"),
        ("norm_weight", lambda t: t[1:], ValueError, r"norm_weight must have shape \(H P,\)"),
        ("ngroups", lambda n: 3, ValueError, r"nheads \(4\) must be a multiple"),
    ],
)
def test_wrong_arguments(name, change, error, words, device):
    arguments = Case(2, 4, 8, 16, 4, norm=True).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments[name] = change(arguments[name])
    if isinstance(arguments[name], torch.Tensor):
        arguments[name] = arguments[name].to(device)
    states = States(*(arguments.pop(state) for state in STATES))
    with pytest.raises(error, match=words):
        mamba3_block_step(arguments.pop("zxBCdt"), states, **arguments)
