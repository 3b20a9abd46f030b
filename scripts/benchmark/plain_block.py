"""A Mamba-2 layer on the CPU, as ratios to plain torch in the same run."""

import cases
import plain
import progress
import torch
import torch.nn.functional as F
from problems import block
from side import Side
from timing import cpu_seconds

from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.ops.norm import gated_rms_norm_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan

REPEATS, PLAIN_REPEATS = 10, 3


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


def measure(device):
    case = cases.PLAIN_BLOCK
    torch.set_num_threads(cases.CPU_THREADS)
    layer = block.make_layer(case, "cpu", Mamba2)
    x = torch.randn(case.batch, case.seqlen, case.d_model, requires_grad=True)
    progress.show("comparing with float64")
    block.validate(Side(), layer, x)
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
    ours, others = [], []
    for threads in (cases.CPU_THREADS, 1):
        torch.set_num_threads(threads)
        ours.append(seconds(f"Mamba2 (threads: {threads})", layer, REPEATS))
        others.append(seconds(f"plain torch (threads: {threads})", lambda x: _plain(layer, x), PLAIN_REPEATS))
    times = dict(zip(("fwd", "fwd+bwd"), map(min, zip(*ours, strict=True)), strict=True))
    times.update(zip(("plain fwd", "plain fwd+bwd"), map(min, zip(*others, strict=True)), strict=True))
    return [{"case": case.name, "threads": cases.CPU_THREADS, **plain.compared(times), "load": plain.load()}]
