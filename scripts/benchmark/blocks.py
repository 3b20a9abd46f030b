"""The blocks' sections: whole Mamba and Mamba-2 layers, the host's time included, and their memory."""

import copy

import cases
import progress
import torch
import torch.nn.functional as F
from timing import cpu_seconds, gpu_milliseconds, load, tensor_bytes

from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.ops.norm.reference import gated_rms_norm_ref
from mamba_ssm.ops.selective_scan_interface import mamba_inner_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_split_conv1d_scan_ref

VALIDATED_STEPS = 256
REPEATS, PLAIN_REPEATS = 10, 3


def _reference(layer, x):
    """A Mamba layer in x's dtype by plain torch."""
    return mamba_inner_ref(
        F.linear(x, layer.in_proj.weight).transpose(1, 2),
        layer.conv1d.weight,
        layer.conv1d.bias,
        layer.x_proj.weight,
        layer.dt_proj.weight,
        layer.out_proj.weight,
        layer.out_proj.bias,
        -torch.exp(layer.A_log),
        D=layer.D,
        delta_bias=layer.dt_proj.bias,
    )


def _reference2(layer, x):
    """A Mamba-2 layer in x's dtype by plain torch."""
    return mamba_split_conv1d_scan_ref(
        F.linear(x, layer.in_proj.weight),
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        layer.dt_bias,
        -torch.exp(layer.A_log),
        layer.D,
        layer.chunk_size,
        rmsnorm_weight=layer.norm.weight,
        rmsnorm_eps=layer.norm.eps,
        outproj_weight=layer.out_proj.weight,
        headdim=layer.headdim,
        ngroups=layer.ngroups,
        norm_before_gate=layer.norm_before_gate,
    )


def _relative_error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def _validate(case, layer, x, reference):
    """Check the output's first steps at full size, and every gradient at a short length.

    bfloat16 projections and activations in between leave about 1 % of error.
    """
    short = x[-1:, :VALIDATED_STEPS].detach().requires_grad_()
    out = layer(short)
    dout = torch.randn_like(out)
    out.backward(dout)
    wide, wide_x = copy.deepcopy(layer).double(), short.detach().double().requires_grad_()
    wide.zero_grad()
    expected = reference(wide, wide_x)
    expected.backward(dout.double())
    with torch.no_grad():
        errors = {"out": _relative_error(layer(x)[-1:, :VALIDATED_STEPS], expected)}
    errors["dx"] = _relative_error(short.grad, wide_x.grad)
    for (name, parameter), exact in zip(layer.named_parameters(), wide.parameters(), strict=True):
        errors[f"d{name}"] = _relative_error(parameter.grad, exact.grad)
        parameter.grad = None
    bad = {name: error for name, error in errors.items() if not error <= 0.03}
    if bad:
        raise AssertionError(f"block {case.name}: relative errors above 0.03: {bad}")


def _kept_upstream(case, layer):
    """Bytes that upstream's Mamba keeps from forward to backward.

    xz, x_dbl, out and an (a, b) pair of floats per state and 2048 steps; the input of in_proj is no copy.
    """
    batch, seqlen, dim, dstate = case.batch, case.seqlen, layer.d_inner, layer.d_state
    tokens = batch * seqlen
    activations = tokens * (2 * dim + dim + layer.dt_rank + 2 * dstate) * 2
    return activations + batch * dim * -(-seqlen // 2048) * dstate * 2 * 4


def _kept_upstream2(case, layer):
    """Bytes that upstream's Mamba2 keeps: zxbcdt, the scan's output, and 1 / rms of each token in float32."""
    return case.batch * case.seqlen * ((layer.in_proj.out_features + layer.d_ssm) * 2 + layer.ngroups * 4)


def _measure(blocks, module, reference, kept_upstream):
    rows = []
    for case in blocks:
        progress.show(case.name)
        torch.manual_seed(0)
        layer = module(case.d_model, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(case.batch, case.seqlen, case.d_model, device="cuda", dtype=torch.bfloat16)
        _validate(case, layer, x, reference)
        x.requires_grad_()
        dout = torch.randn_like(x)
        wanted = [x, *layer.parameters()]

        def both(layer=layer, x=x, wanted=wanted, dout=dout):
            return torch.autograd.grad(layer(x), wanted, dout)

        forward_ms = gpu_milliseconds(layer, [(x,)], with_host=True)
        both_ms = gpu_milliseconds(both, [()], with_host=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = layer(x)
        kept = torch.cuda.memory_allocated() - before - tensor_bytes([out])
        gradients = torch.autograd.grad(out, wanted, dout)
        peak = torch.cuda.max_memory_allocated() - before
        del out, gradients
        activation = case.batch * case.seqlen * layer.d_inner * 2
        rows.append(
            {
                "case": case.name,
                "fwd ms": forward_ms,
                "fwd+bwd ms": both_ms,
                "upstream fwd": case.upstream_forward,
                "upstream fwd+bwd": case.upstream_both,
                "fwd x": case.upstream_forward / forward_ms,
                "fwd+bwd x": case.upstream_both / both_ms,
                "goal x": case.goal,
                "kept MB": kept * 1e-6,
                "upstream kept MB": kept_upstream(case, layer) * 1e-6,
                "step peak MB": peak * 1e-6,
                "peak in (B,L,D)": peak / activation,
            }
        )
    return rows


def block(machine):
    return _measure(cases.BLOCKS, Mamba, _reference, _kept_upstream)


def mamba2(machine):
    if machine["device"] == "cpu":
        return _mamba2_on_cpu()
    return _measure(cases.MAMBA2_BLOCKS, Mamba2, _reference2, _kept_upstream2)


def _plain(layer, x):
    """A Mamba-2 layer of torch's own operators, as one would write it without kernels: the scan goes by chunks."""
    state = layer.ngroups * layer.d_state
    z, xBC, dt = F.linear(x, layer.in_proj.weight).split([layer.d_ssm, layer.d_ssm + 2 * state, layer.nheads], dim=-1)
    xBC = F.silu(layer.conv1d(xBC.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
    inner, B, C = xBC.split([layer.d_ssm, state, state], dim=-1)
    y = mamba_chunk_scan(
        inner.unflatten(-1, (layer.nheads, layer.headdim)),
        dt,
        -torch.exp(layer.A_log),
        B.unflatten(-1, (layer.ngroups, layer.d_state)),
        C.unflatten(-1, (layer.ngroups, layer.d_state)),
        64,  # the fastest of 32, 64, 128 and 256 here
        D=layer.D,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
    ).flatten(2)
    y = gated_rms_norm_ref(y, layer.norm.weight, None, z, layer.norm.eps, norm_before_gate=False)
    return F.linear(y, layer.out_proj.weight)


def _mamba2_on_cpu():
    """Ratios of one run to plain torch, in float32."""
    from cpu import compared

    case = cases.MAMBA2_CPU_BLOCK
    torch.manual_seed(0)
    torch.set_num_threads(cases.CPU_THREADS)
    layer = Mamba2(case.d_model)
    x = torch.randn(case.batch, case.seqlen, case.d_model, requires_grad=True)
    progress.show("comparing with float64")
    _validate(case, layer, x, _reference2)
    wanted = [x, *layer.parameters()]
    dout = torch.randn_like(x)

    def seconds(name, function, repeats):
        """Forward without gradients, and forward and backward."""

        def forward():
            with torch.no_grad():
                function(x)

        def both():
            torch.autograd.grad(function(x), wanted, dout)

        return (
            cpu_seconds(f"{name}, forward", forward, repeats),
            cpu_seconds(f"{name}, forward and backward", both, repeats),
        )

    # On a busy machine threads wait for each other: for either, the faster number of threads counts.
    ours, plain = [], []
    for threads in (cases.CPU_THREADS, 1):
        torch.set_num_threads(threads)
        ours.append(seconds(f"Mamba2 (threads: {threads})", layer, REPEATS))
        plain.append(seconds(f"plain torch (threads: {threads})", lambda x: _plain(layer, x), PLAIN_REPEATS))
    times = dict(zip(("fwd", "fwd+bwd"), map(min, zip(*ours, strict=True)), strict=True))
    times.update(zip(("plain fwd", "plain fwd+bwd"), map(min, zip(*plain, strict=True)), strict=True))
    return [{"case": f"{case.name} float32", "threads": cases.CPU_THREADS, **compared(times), "load": load()}]
