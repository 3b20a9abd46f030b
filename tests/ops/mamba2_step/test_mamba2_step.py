"""mamba2_step against its reference: outputs and both states, step after step."""

from dataclasses import dataclass

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, case_id, dtype_id

from mamba_ssm.ops.mamba2_step import mamba2_step, mamba2_step_ref

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    headdim: int
    dstate: int
    groups: int = 1
    width: int = 4
    state_len: int = 4
    norm: bool = True
    gate: bool = True
    before: bool = False
    bias: bool = True
    D_has_hdim: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))

    def options(self):
        return {
            "ngroups": self.groups,
            "dt_limit": self.limits,
            "gate": self.gate,
            "norm_before_gate": self.before,
        }

    def inputs(self, dtype, state_dtype, weight_dtype, device):
        """Arguments and options of mamba2_step."""
        dim = self.heads * self.headdim
        channels = dim + 2 * self.groups * self.dstate

        def normal(*shape, dtype=weight_dtype, shift=0.0):
            return (torch.randn(*shape) + shift).to(device, dtype)

        return {
            "zxbcdt": normal(self.batch, dim + channels + self.heads, dtype=dtype),
            "conv_state": normal(self.batch, self.state_len, channels, dtype=state_dtype).transpose(1, 2),
            "ssm_state": normal(self.batch, self.heads, self.headdim, self.dstate, dtype=state_dtype),
            "conv1d_weight": normal(channels, self.width),
            "conv1d_bias": normal(channels) if self.bias else None,
            "dt_bias": normal(self.heads, shift=-2.0),
            "A_log": normal(self.heads),
            "D": normal(self.heads, self.headdim) if self.D_has_hdim else normal(self.heads),
            "rmsnorm_weight": normal(dim) if self.norm else None,
            **self.options(),
        }


CASES = (
    Case(2, 4, 64, 128),
    Case(1, 1, 1, 1),
    Case(3, 6, 8, 16, groups=3, width=3),
    Case(2, 4, 5, 7, groups=2, width=2, bias=False),  # no vectors
    Case(2, 2, 256, 256, before=True),
    Case(1, 2, 65, 130, D_has_hdim=True),
    Case(2, 4, 8, 4, width=2, state_len=4),
    Case(2, 4, 8, 24, width=4, state_len=3, groups=4),
    Case(2, 4, 8, 4, width=3, state_len=7, norm=False),
    Case(2, 4, 8, 4, norm=False, gate=False),
    Case(2, 3, 16, 12, limits=(0.1, 0.3)),
    Case(1, 160, 64, 4),  # a norm of more than 8192 channels
    Case(20, 24, 64, 16),  # heads that a block shares with the next
    Case(2, 1, 8, 256),  # one block for a group, fewer threads than channels of B and C
)


def run(function, arguments, dtype=None, steps=3):
    """Some steps one after the other, each on the output of a rotation of the same rows."""
    arguments = {
        name: value.to(dtype) if dtype and isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    states = {name: arguments[name].clone() for name in ("conv_state", "ssm_state")}
    zxbcdt = arguments["zxbcdt"]
    outs = [function(**{**arguments, **states, "zxbcdt": zxbcdt.roll(step, 1)}) for step in range(steps)]
    return {"out": torch.stack(outs), **states}


def compare(arguments, steps=3):
    found = run(mamba2_step, arguments, steps=steps)
    assert found["out"].dtype == arguments["zxbcdt"].dtype
    plain = run(mamba2_step_ref, arguments, steps=steps)
    assert_close_to_truth(found, plain, run(mamba2_step_ref, arguments, torch.float64, steps))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_reference(case, dtype, device):
    compare(case.inputs(dtype, dtype, dtype, device))


@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: "state_" + dtype_id(dtype))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: "weight_" + dtype_id(dtype))
def test_mixed_dtypes(state_dtype, weight_dtype, device):
    """As autocast and caches of their own dtype make them."""
    compare(Case(2, 4, 8, 16, groups=2).inputs(torch.bfloat16, state_dtype, weight_dtype, device))


def test_strided_views(device):
    arguments = Case(3, 4, 8, 16).inputs(torch.float32, torch.float32, torch.float32, device)
    expected = run(mamba2_step, arguments)
    zxbcdt = arguments["zxbcdt"]
    strided = {
        **arguments,
        "zxbcdt": torch.cat([zxbcdt, zxbcdt], dim=1)[:, : zxbcdt.shape[1]],
        "conv_state": arguments["conv_state"].contiguous(),
        "ssm_state": arguments["ssm_state"].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        "D": torch.stack([arguments["D"]] * 2, dim=1)[:, 0],
    }
    found = run(mamba2_step, strided)
    torch.testing.assert_close(found["out"], expected["out"])  # on a GPU sums over states in another order
    for name in ("conv_state", "ssm_state"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    columns = {**arguments, "zxbcdt": zxbcdt.T.contiguous().T}
    torch.testing.assert_close(run(mamba2_step, columns, steps=1)["out"][0], expected["out"][0], rtol=0, atol=0)


def test_a_batch_is_its_rows(device):
    """Many rows and one alone take other shares of a head a block."""
    arguments = Case(40, 8, 64, 16).inputs(torch.float32, torch.float32, torch.float32, device)
    together = run(mamba2_step, arguments, steps=1)
    row = {name: arguments[name][7:8] for name in ("zxbcdt", "conv_state", "ssm_state")}
    alone = run(mamba2_step, {**arguments, **row}, steps=1)
    for name in ("conv_state", "ssm_state"):
        torch.testing.assert_close(together[name][7:8], alone[name])
    torch.testing.assert_close(together["out"][:, 7:8], alone["out"])


def test_no_batch(device):
    arguments = Case(0, 4, 8, 16).inputs(torch.float32, torch.float32, torch.float32, device)
    assert mamba2_step(**arguments).shape == (0, 32)


def test_a_nan_stays_in_its_row(device):
    arguments = Case(2, 4, 8, 16).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments["zxbcdt"][0, 5] = float("nan")  # z of head 0
    out = mamba2_step(**arguments)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=case_id)
@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck(case, device):
    arguments = case.inputs(torch.float32, torch.float32, torch.float32, device)
    tensors = [value for value in arguments.values() if value is None or isinstance(value, torch.Tensor)]
    options = case.groups, *case.limits, case.gate, 1e-5, case.before
    torch.library.opcheck(torch.ops.mamba_ssm.mamba2_step.default, (*tensors, *options))


@pytest.mark.parametrize(
    "name,change,error,words",
    [
        ("zxbcdt", lambda t: t[:, 1:], ValueError, "zxbcdt must have 2 H P .* = 132 columns .* got 131"),
        ("zxbcdt", lambda t: t.double(), TypeError, "zxbcdt must be float32, float16 or bfloat16, got float64"),
        ("conv_state", lambda t: t[:, 1:], ValueError, r"conv_state must have shape \(B, D, S\)"),
        ("conv_state", lambda t: t[..., :2], ValueError, "must hold at least W-1 = 3 steps, got S = 2"),
        ("conv_state", lambda t: t[:, :1].expand(t.shape), ValueError, "conv_state is written in place"),
        ("ssm_state", lambda t: t[:1], ValueError, r"ssm_state must have shape \(B, H, P, N\)"),
        ("dt_bias", lambda t: t[1:], ValueError, r"dt_bias must have shape \(H,\)"),
        ("D", lambda t: t[:, None], ValueError, r"D must have shape \(H, P\)"),
        ("rmsnorm_weight", lambda t: t[1:], ValueError, r"rmsnorm_weight must have shape \(H P,\)"),
        ("ngroups", lambda n: 3, ValueError, r"nheads \(4\) must be a multiple"),
    ],
)
def test_wrong_arguments(name, change, error, words, device):
    arguments = Case(2, 4, 8, 16, groups=2).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=words):
        mamba2_step(**arguments)
