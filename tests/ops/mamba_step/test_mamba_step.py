"""mamba_step against its reference: outputs and both states, step after step."""

from dataclasses import dataclass

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, case_id, dtype_id

from mamba_ssm.ops.linear import dequantize_ref, quantize_weight
from mamba_ssm.ops.mamba_step import mamba_step, mamba_step_ref

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Case:
    batch: int
    dim: int
    rank: int
    dstate: int = 16
    width: int = 4
    state_len: int = 4
    conv_bias: bool = True
    dt_bias: bool = True

    def inputs(self, dtype, state_dtype, weight_dtype, device):
        """Arguments of mamba_step."""

        def normal(*shape, dtype=weight_dtype, scale=1.0):
            return (scale * torch.randn(*shape)).to(device, dtype)

        scale = self.dim**-0.5
        return {
            "xz": normal(self.batch, 2 * self.dim, dtype=dtype),
            "conv_state": normal(self.batch, self.dim, self.state_len, dtype=state_dtype),
            "ssm_state": normal(self.batch, self.dim, self.dstate, dtype=state_dtype),
            "conv1d_weight": normal(self.dim, self.width),
            "conv1d_bias": normal(self.dim) if self.conv_bias else None,
            "x_proj_weight": normal(self.rank + 2 * self.dstate, self.dim, dtype=dtype, scale=scale),
            "dt_proj_weight": normal(self.dim, self.rank, dtype=dtype, scale=self.rank**-0.5),
            "dt_bias": normal(self.dim) if self.dt_bias else None,
            "A_log": normal(self.dim, self.dstate),
            "D": normal(self.dim),
        }


CASES = (
    Case(2, 128, 8),
    Case(1, 1, 1, 1),
    Case(3, 70, 3, 5, width=3),  # no vectors
    Case(9, 64, 4, 4, width=2, conv_bias=False),
    Case(5, 200, 13, 16, dt_bias=False),
    Case(2, 96, 40, 100),  # more than 128 outputs of x_proj
    Case(1, 32, 20, 256, state_len=3),
    Case(2, 33, 2, 16, width=3, state_len=6),
    Case(64, 320, 4, 8),  # blocks walk several tiles of channels
    Case(2, 16, 5000, 8),  # one batch entry a block
    Case(2, 1552, 12, 16),  # a cluster's last block has fewer channels
)


def run(function, arguments, dtype=None, steps=3):
    """Some steps one after the other, each on a rotation of the same rows."""
    arguments = {
        name: value if value is None or dtype is None else value.to(dtype) for name, value in arguments.items()
    }
    states = {name: arguments[name].clone() for name in ("conv_state", "ssm_state")}
    outs = [function(**{**arguments, **states, "xz": arguments["xz"].roll(step, 1)}) for step in range(steps)]
    return {"out": torch.stack(outs), **states}


def compare(arguments):
    found = run(mamba_step, arguments)
    assert found["out"].dtype == arguments["xz"].dtype
    plain = run(mamba_step_ref, arguments)
    assert_close_to_truth(found, plain, run(mamba_step_ref, arguments, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_reference(case, dtype, device):
    compare(case.inputs(dtype, dtype, dtype, device))


@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: "state_" + dtype_id(dtype))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: "weight_" + dtype_id(dtype))
def test_mixed_dtypes(state_dtype, weight_dtype, device):
    """As autocast and caches of their own dtype make them."""
    compare(Case(2, 128, 8).inputs(torch.bfloat16, state_dtype, weight_dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[7], CASES[8]], ids=case_id)
def test_int8_weight_of_x_proj(case, dtype, device):
    """Plain torch takes it rounded to dtype, as the GPU's tensor cores do. The CPU rounds x to within 2^-16 of the
    largest of 32, which the state multiplies.
    """
    arguments = case.inputs(dtype, dtype, dtype, device)
    weight, scales = quantize_weight(arguments["x_proj_weight"])
    found = run(mamba_step, {**arguments, "x_proj_weight": weight, "x_proj_scales": scales})
    rounded, exact = (dequantize_ref(weight, scales, of) for of in (dtype, torch.float64))
    plain = run(mamba_step_ref, {**arguments, "x_proj_weight": rounded})
    truth = run(mamba_step_ref, {**arguments, "x_proj_weight": exact}, torch.float64)
    assert_close_to_truth(found, plain, truth, atol=3e-4 if device == "cpu" else 2e-5)
    assert torch.equal(
        run(mamba_step_ref, {**arguments, "x_proj_weight": weight, "x_proj_scales": scales})["out"],
        run(mamba_step_ref, {**arguments, "x_proj_weight": dequantize_ref(weight, scales, torch.float32)})["out"],
    )


def test_strided_views(device):
    arguments = Case(3, 72, 8).inputs(torch.float32, torch.float32, torch.float32, device)
    expected = run(mamba_step, arguments)
    strided = {
        **arguments,
        "xz": torch.cat([arguments["xz"]] * 2, dim=1)[:, :144],
        "conv_state": arguments["conv_state"].transpose(1, 2).contiguous().transpose(1, 2),
        "ssm_state": arguments["ssm_state"].permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "A_log": arguments["A_log"].T.contiguous().T,
    }
    torch.testing.assert_close(run(mamba_step, strided), expected, rtol=0, atol=0)


def test_weights_at_any_address(device):
    """Vectors need addresses that are multiples of 16."""
    arguments = Case(3, 72, 8).inputs(torch.float32, torch.float32, torch.float32, device)
    expected = run(mamba_step, arguments)
    for name in ("x_proj_weight", "dt_proj_weight", "A_log", "ssm_state"):
        moved = torch.empty(arguments[name].numel() + 1, device=device)[1:].view(arguments[name].shape)
        arguments[name] = moved.copy_(arguments[name])
    torch.testing.assert_close(run(mamba_step, arguments), expected, rtol=0, atol=0)


def test_no_batch(device):
    arguments = Case(0, 32, 2).inputs(torch.float32, torch.float32, torch.float32, device)
    assert mamba_step(**arguments).shape == (0, 32)


def test_a_nan_stays_in_its_row(device):
    arguments = Case(2, 128, 8).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments["xz"][0, 5] = float("nan")
    out = mamba_step(**arguments)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck(device):
    arguments = Case(2, 128, 8).inputs(torch.float32, torch.float32, torch.float32, device)
    torch.library.opcheck(torch.ops.mamba_ssm.mamba_step.default, tuple(arguments.values()))


@pytest.mark.parametrize(
    "name,change,error,words",
    [
        ("xz", lambda t: t[:, 1:], ValueError, "xz must have 2 D = 256 columns, as ssm_state has D = 128, got 255"),
        ("xz", lambda t: t.double(), TypeError, "xz must be float32, float16 or bfloat16, got float64"),
        ("conv_state", lambda t: t[..., :2], ValueError, "must hold at least W-1 = 3 steps, got S = 2"),
        ("ssm_state", lambda t: t[:1], ValueError, r"ssm_state must have shape \(B, D, N\)"),
        ("ssm_state", lambda t: t[..., :1].expand(t.shape), ValueError, "ssm_state is written in place"),
        ("A_log", lambda t: t[:, 1:], ValueError, r"A_log must have shape \(D, N\)"),
        ("x_proj_weight", lambda t: t[1:], ValueError, r"x_proj_weight must have shape \(R \+ 2 N, D\)"),
        ("x_proj_weight", lambda t: t.half(), TypeError, "x_proj_weight must have the dtype of xz, float32"),
        ("dt_proj_weight", lambda t: t[1:], ValueError, r"dt_proj_weight must have shape \(D, R\)"),
        ("D", lambda t: t[1:], ValueError, r"D must have shape \(D,\)"),
    ],
)
def test_wrong_arguments(name, change, error, words, device):
    arguments = Case(2, 128, 8).inputs(torch.float32, torch.float32, torch.float32, device)
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=words):
        mamba_step(**arguments)


@pytest.mark.parametrize(
    "change,error,words",
    [
        ({"x_proj_weight": torch.randn(40, 128)}, TypeError, "x_proj_weight must be int8, got float32"),
        ({"x_proj_scales": torch.ones(40, 3).half()}, ValueError, r"x_proj_scales must have shape \(R \+ 2 N, ceil"),
        ({"x_proj_scales": torch.ones(40, 4)}, TypeError, "x_proj_scales must be float16, got float32"),
        ({"x_proj_scales": None}, TypeError, "x_proj_weight must have the dtype of xz, float32, got int8"),
        ({"x_proj_weight": None}, TypeError, "x_proj_weight must be a"),
    ],
)
def test_wrong_int8_arguments(change, error, words):
    arguments = Case(2, 128, 8).inputs(torch.float32, torch.float32, torch.float32, "cpu")
    weight, scales = quantize_weight(arguments["x_proj_weight"])
    with pytest.raises(error, match=words):
        mamba_step(**{**arguments, "x_proj_weight": weight, "x_proj_scales": scales, **change})
