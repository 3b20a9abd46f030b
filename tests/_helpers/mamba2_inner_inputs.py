"""Random arguments of mamba_split_conv1d_scan_combined, for the tests of it and of the block around it."""

import torch

D_MODEL, HEADS, HEADDIM, DSTATE = 12, 4, 6, 5
DIM = HEADS * HEADDIM


def inputs(
    dtype,
    device,
    batch=2,
    seqlen=71,
    ngroups=1,
    d_mlp=0,
    bias=True,
    D="per_head",
    norm=True,
    project=True,
    initial_states=False,
    seq_idx=False,
):
    """Tensors, and the other keyword arguments."""

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(*shape)).to(device, dtype)

    f32 = torch.float32
    channels = DIM + 2 * ngroups * DSTATE
    starts = torch.rand(batch, seqlen) < 0.1
    tensors = {
        "zxbcdt": normal(batch, seqlen, 2 * d_mlp + DIM + channels + HEADS),
        "conv1d_weight": normal(channels, 4, scale=0.5),
        "conv1d_bias": normal(channels) if bias else None,
        "dt_bias": normal(HEADS, dtype=f32) - 2.0,
        "A": -0.5 - torch.rand(HEADS).to(device),
        "D": {"per_head": lambda: normal(HEADS, dtype=f32), "full": lambda: normal(HEADS, HEADDIM, dtype=f32)}.get(
            D, lambda: None
        )(),
        "initial_states": normal(batch, HEADS, HEADDIM, DSTATE, dtype=f32) if initial_states else None,
        "seq_idx": starts.cumsum(1).to(torch.int32).to(device) if seq_idx else None,
        "rmsnorm_weight": normal(DIM) if norm else None,
        "outproj_weight": normal(D_MODEL, d_mlp + DIM, scale=DIM**-0.5) if project else None,
        "outproj_bias": normal(D_MODEL) if project and bias else None,
    }
    return tensors, {"chunk_size": 64, "headdim": HEADDIM, "ngroups": ngroups}
