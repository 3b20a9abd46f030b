"""selective_scan_cuda, _core and _oflex, called as copies of upstream's and VMamba's Python code call them."""

import pytest
import torch
from _helpers.cases import DTYPES, ScanCase, assert_close_to_truth, case_id, dtype_id, outputs_and_gradients

import selective_scan_cuda
import selective_scan_cuda_core
import selective_scan_cuda_oflex
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref


class GatedScan(torch.autograd.Function):
    """In the manner of upstream's 1.x and all that copied it."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, softplus, into):
        out, x, *rest = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, delta_bias, softplus)
        ctx.softplus, ctx.into = softplus, into
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, x, out)
        last_state = x[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last_state)
        return (rest[0] if z is not None else out), last_state

    @staticmethod
    def backward(ctx, dout, _):
        u, delta, A, B, C, D, z, delta_bias, x, out = ctx.saved_tensors
        dz = torch.empty_like(torch.cat([u, u], 1)).chunk(2, 1)[1] if ctx.into else None
        du, ddelta, dA, dB, dC, dD, ddelta_bias, *rest = selective_scan_cuda.bwd(
            u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, ctx.softplus, False
        )
        assert len(rest) == (z is not None)
        if dz is not None:
            assert rest[0] is dz
        return du, ddelta, dA, dB, dC, dD, (rest[0] if rest else None), ddelta_bias, None, None


def gated(case, into=False):
    def run(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx):
        return GatedScan.apply(u, delta, A, B, C, D, z, delta_bias, case.softplus, into)[0]

    return run


def plain(case):
    return lambda **tensors: selective_scan_ref(**tensors, delta_softplus=case.softplus)


CASES = (
    ScanCase(2, 6, 70),
    ScanCase(1, 1, 1, dstate=1),
    ScanCase(2, 12, 130, groups=3, dstate=5),
    ScanCase(3, 7, 64, z=False),
    ScanCase(2, 9, 97, D=False, delta_bias=False, softplus=False),
    ScanCase(2, 6, 65, variable_B=False, variable_C=False),
    ScanCase(1, 4, 2048),
    ScanCase(1, 3, 4099, dstate=4),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_copy_of_upstreams_function(case, dtype, device):
    tensors = case.inputs(dtype, device)
    found = outputs_and_gradients(gated(case), tensors)
    reference = outputs_and_gradients(plain(case), tensors)
    truth = outputs_and_gradients(plain(case), tensors, torch.float64)
    assert_close_to_truth(found, reference, truth)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_what_fwd_returns(case, device):
    tensors = case.inputs(torch.float32, device)
    del tensors["initial_state"], tensors["seq_idx"]
    out, x, *rest = selective_scan_cuda.fwd(*tensors.values(), case.softplus)
    chunks = -(-case.seqlen // 2048)
    assert x.shape == (case.batch, case.dim, chunks, 2 * case.dstate) and x.dtype == torch.float32
    for chunk in range(chunks):
        part = {
            name: value[..., : 2048 * (chunk + 1)] if value is not None and value.dim() > 2 else value
            for name, value in tensors.items()
            if name != "z"
        }
        expected, state = selective_scan_ref(**part, delta_softplus=case.softplus, return_last_state=True)
        torch.testing.assert_close(x[:, :, chunk, 1::2], state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)  # before the gate
    assert len(rest) == case.z
    if case.z:
        torch.testing.assert_close(rest[0], expected * torch.nn.functional.silu(tensors["z"]), rtol=1e-4, atol=1e-4)


def arguments(case, device, dtype=torch.float32):
    tensors = case.inputs(dtype, device)
    return tensors | {"dout": torch.randn_like(tensors["u"])}


def test_bwd_writes_into_a_given_dz_and_computes_out_z_again(device):
    t = arguments(ScanCase(2, 6, 70), device)
    inputs = [t[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    out, x, out_z = selective_scan_cuda.fwd(*inputs, True)
    fresh = selective_scan_cuda.bwd(*inputs, t["dout"], x, out, None, True, False)
    given = torch.full((2, 12, 70), 7.0, device=out.device)
    again = selective_scan_cuda.bwd(*inputs, t["dout"], x, out, given[:, 6:], True, True)
    assert (len(fresh), len(again)) == (8, 9)
    torch.testing.assert_close(given[:, 6:], fresh[7])
    assert (given[:, :6] == 7).all()
    torch.testing.assert_close(again[8], out_z)
    no_z = selective_scan_cuda.bwd(*inputs[:6], None, inputs[7], t["dout"], x, None, None, True, False)
    assert len(no_z) == 7


def test_a_copy_of_x_will_do(device):
    """As when saved tensors wait on the CPU: what our backward keeps behind x is then computed again."""
    t = arguments(ScanCase(2, 6, 200), device)
    inputs = [t[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    out, x, _ = selective_scan_cuda.fwd(*inputs, True)
    found, expected = (
        selective_scan_cuda.bwd(*inputs, t["dout"], kept, out, None, True, False) for kept in (x.clone(), x)
    )
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


def test_no_gradient_passes_a_module_that_looks_compiled(device):
    t = arguments(ScanCase(1, 4, 20, z=False), device)
    t["u"].requires_grad_()
    out, x = selective_scan_cuda.fwd(t["u"], t["delta"], t["A"], t["B"], t["C"], None, None, None, True)
    assert not out.requires_grad and not x.requires_grad


def test_empty(device):
    t = arguments(ScanCase(2, 6, 0), device)
    out, x, out_z = selective_scan_cuda.fwd(*(t[name] for name in ("u", "delta", "A", "B", "C", "D", "z")), None, True)
    assert out.shape == out_z.shape == (2, 6, 0)
    assert (x[:, :, -1, 1::2] == 0).all()


def test_errors_say_what_is_wrong(device):
    t = arguments(ScanCase(2, 6, 20), device)
    inputs = [t[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]

    def fwd(place, value):
        return selective_scan_cuda.fwd(*inputs[:place], value, *inputs[place + 1 :], True)

    with pytest.raises(TypeError, match="selective_scan: A must be a real float32 tensor"):
        fwd(2, t["A"].to(torch.complex64))
    with pytest.raises(ValueError, match="selective_scan: z must have shape"):
        fwd(6, t["z"][:1])
    with pytest.raises(TypeError, match="selective_scan: D must be float32"):
        fwd(5, t["D"].double())
    with pytest.raises(ValueError, match="selective_scan: x must have 4 dimensions"):
        selective_scan_cuda.bwd(*inputs, t["dout"], t["u"], None, None, True, False)
    with pytest.raises(TypeError, match="missing"):
        selective_scan_cuda.fwd(*inputs)


# ---- VMamba's modules ------------------------------------------------------------------------------------------------


class FlexibleScan(torch.autograd.Function):
    """In the manner of VMamba, by either of its modules."""

    @staticmethod
    def forward(ctx, module, u, delta, A, B, C, D, delta_bias, softplus, *out_float):
        ctx.module, ctx.softplus = module, softplus
        out, x, *_ = module.fwd(u, delta, A, B, C, D, delta_bias, softplus, 1, *out_float)
        ctx.save_for_backward(u, delta, A, B, C, D, delta_bias, x)
        return out

    @staticmethod
    def backward(ctx, dout):
        u, delta, A, B, C, D, delta_bias, x = ctx.saved_tensors
        grads = ctx.module.bwd(u, delta, A, B, C, D, delta_bias, dout, x, ctx.softplus, 1)
        assert len(grads) == 7
        return None, *grads, None, *([None] * (len(ctx.needs_input_grad) - 9))


def flexible(module, softplus, *out_float):
    def run(u, delta, A, B, C, D, delta_bias, **_):
        return FlexibleScan.apply(module, u, delta, A, B, C, D, delta_bias, softplus, *out_float)

    return run


def repeated(softplus):
    """The reference, each row of delta for as many neighbouring channels."""

    def run(u, delta, A, B, C, D, delta_bias, **_):
        times = u.shape[1] // delta.shape[1]
        delta, bias = delta.repeat_interleave(times, 1), delta_bias
        if bias is not None and len(bias) != u.shape[1]:
            bias = bias.repeat_interleave(times)
        return selective_scan_ref(u, delta, A, B, C, D, None, bias, softplus)

    return run


@pytest.mark.parametrize("rows", [12, 4, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "module, out_float",
    [
        (selective_scan_cuda_core, ()),
        (selective_scan_cuda_oflex, (False,)),
        (selective_scan_cuda_oflex, (True,)),
    ],
    ids=["core", "oflex", "oflex-float"],
)
def test_a_copy_of_vmambas_function(module, out_float, dtype, rows, device):
    tensors = ScanCase(2, 12, 130, groups=4, dstate=1, z=False).inputs(dtype, device)
    tensors["delta"] = tensors["delta"][:, :rows].contiguous()
    for bias_rows in {12, rows}:
        tensors["delta_bias"] = torch.linspace(-0.2, 0.2, bias_rows, device=tensors["u"].device)
        found = outputs_and_gradients(flexible(module, True, *out_float), tensors)
        reference = outputs_and_gradients(repeated(True), tensors)
        truth = outputs_and_gradients(repeated(True), tensors, torch.float64)
        assert found["out0"].dtype == (torch.float32 if any(out_float) else dtype)
        for name, gradient in found.items():
            if name != "out0":
                assert gradient.dtype == tensors[name[1:]].dtype, name
        assert_close_to_truth(found, reference, truth, atol=max(2e-5, torch.finfo(dtype).eps))


def test_a_float_output_of_halves_is_not_rounded(device):
    tensors = ScanCase(1, 6, 40, z=False).inputs(torch.bfloat16, device)
    out, _ = selective_scan_cuda_oflex.fwd(
        *(tensors[name] for name in ("u", "delta", "A", "B", "C", "D", "delta_bias")), True, 1, True
    )
    wide = {name: value.float() if value is not None else None for name, value in tensors.items()}
    torch.testing.assert_close(out, selective_scan_fn(**wide, delta_softplus=True))
    assert not torch.equal(out, out.bfloat16().float())


def test_rows_of_delta_that_do_not_divide_the_channels(device):
    t = arguments(ScanCase(1, 6, 20), device)
    with pytest.raises(ValueError, match="delta's rows must divide u's channels, 6, got 4"):
        selective_scan_cuda_core.fwd(t["u"], t["delta"][:, :4], t["A"], t["B"], t["C"], None, None, True, 1)
