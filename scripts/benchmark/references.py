"""What every result is held against: plain torch, in float64 where the caller's tensors are. Imports no mamba_ssm.

Layers and models are given as modules with upstream's parameter names, whichever package they come from.
"""

import torch
import torch.nn.functional as F

# ---- operators -------------------------------------------------------------------------------------------------------


def scan(u, delta, A, B, C, D=None, z=None, delta_bias=None):
    """The selective scan with softplus, step by step: u, delta, z (batch, D, L); B, C (batch, N, L)."""
    delta = F.softplus(delta + delta_bias[:, None])
    state = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    outputs = []
    for step in range(u.shape[2]):
        dt = delta[:, :, step, None]
        state = torch.exp(dt * A) * state + dt * u[:, :, step, None] * B[:, None, :, step]
        outputs.append((state * C[:, None, :, step]).sum(-1))
    out = torch.stack(outputs, -1) + D[:, None] * u
    return out if z is None else out * F.silu(z)


def ssd(x, dt, A, B, C, D, dt_bias, chunk=64):
    """Mamba-2's scan with softplus, by chunks: x (batch, L, H, P), dt (batch, L, H), B and C (batch, L, 1, N)."""
    seqlen = x.shape[1]
    chunk = min(chunk, seqlen)
    dt = F.softplus(dt + dt_bias)
    B, C = B[:, :, 0], C[:, :, 0]
    missing = -seqlen % chunk  # steps of dt 0 change no state
    inner, dt, B, C = (
        F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)).unflatten(1, (-1, chunk)) for tensor in (x, dt, B, C)
    )
    inner = inner * dt[..., None]
    log_decay = (dt * A).cumsum(2)  # (batch, chunks, chunk, H), from the chunk's beginning
    between = log_decay[:, :, :, None] - log_decay[:, :, None]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()[..., None]
    weights = torch.einsum("bcin,bcjn->bcij", C, B)[..., None] * between.masked_fill(~causal, -torch.inf).exp()
    out = torch.einsum("bcijh,bcjhp->bcihp", weights, inner)
    to_end = (log_decay[:, :, -1:] - log_decay).exp()
    added = torch.einsum("bcjn,bcjh,bcjhp->bchpn", B, to_end, inner)
    whole = log_decay[:, :, -1].exp()[..., None, None]
    state, before = torch.zeros_like(added[:, 0]), []
    for i in range(added.shape[1]):
        before.append(state)
        state = whole[:, i] * state + added[:, i]
    out = out + torch.einsum("bcin,bcih,bchpn->bcihp", C, log_decay.exp(), torch.stack(before, 1))
    return out.flatten(1, 2)[:, :seqlen] + D[:, None] * x


def conv(x, weight, bias):
    """Causal convolution and silu: x (batch, D, L), weight (D, W). By shifts: torch's own is slow in float64."""
    width, seqlen = weight.shape[1], x.shape[2]
    padded = F.pad(x, (width - 1, 0))
    taps = [padded[..., i : i + seqlen] * weight[:, i, None] for i in range(width)]
    return F.silu(sum(taps) + bias[:, None])


def conv_update(x, state, weight, bias):
    """(out, new state) of one step: x (batch, D), state (batch, D, W)."""
    state = torch.cat([state[..., 1:], x[..., None]], -1)
    return F.silu((state * weight).sum(-1) + bias), state


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def gated_rms_norm(x, z, weight, eps):
    return rms_norm(x * F.silu(z), weight, eps)


def state_update(state, x, dt, A, B, C, D, z, dt_bias):
    """(out, new state) of a step: state (batch, D, N), B and C (batch, N), or (batch, H, P, N) and (batch, 1, N)."""
    dt = F.softplus(dt + dt_bias)[..., None]
    B, C = (matrix[:, :, None] if state.dim() == 4 else matrix[:, None] for matrix in (B, C))
    state = torch.exp(dt * A) * state + dt * x[..., None] * B
    out = (state * C).sum(-1) + D * x
    return (out if z is None else out * F.silu(z)), state


# ---- layers and models -----------------------------------------------------------------------------------------------


def mamba(layer, hidden):
    """A Mamba layer: (batch, L, d_model)."""
    x, z = F.linear(hidden, layer.in_proj.weight).transpose(1, 2).chunk(2, dim=1)
    x = conv(x, layer.conv1d.weight[:, 0], layer.conv1d.bias)
    dt_rank, dstate = layer.dt_proj.weight.shape[1], layer.A_log.shape[1]
    dt, B, C = F.linear(x.transpose(1, 2), layer.x_proj.weight).split([dt_rank, dstate, dstate], dim=-1)
    dt = F.linear(dt, layer.dt_proj.weight).transpose(1, 2)
    A = -torch.exp(layer.A_log)
    out = scan(x, dt, A, B.transpose(1, 2), C.transpose(1, 2), layer.D, z, layer.dt_proj.bias)
    return F.linear(out.transpose(1, 2), layer.out_proj.weight)


def mamba2(layer, hidden):
    """A Mamba-2 layer with one group and the norm after the gate: (batch, L, d_model)."""
    heads = layer.A_log.shape[0]
    width = layer.out_proj.weight.shape[1]
    channels = layer.conv1d.weight.shape[0]
    dstate = (channels - width) // 2
    z, xBC, dt = F.linear(hidden, layer.in_proj.weight).split([width, channels, heads], dim=-1)
    xBC = conv(xBC.transpose(1, 2), layer.conv1d.weight[:, 0], layer.conv1d.bias).transpose(1, 2)
    x, B, C = xBC.split([width, dstate, dstate], dim=-1)
    A = -torch.exp(layer.A_log)
    out = ssd(x.unflatten(-1, (heads, -1)), dt, A, B[:, :, None], C[:, :, None], layer.D, layer.dt_bias).flatten(2)
    return F.linear(gated_rms_norm(out, z, layer.norm.weight, layer.norm.eps), layer.out_proj.weight)


def layer(module, hidden):
    return (mamba if hasattr(module, "x_proj") else mamba2)(module, hidden)


def language_model(model, tokens):
    """Logits (batch, L, vocabulary) of a model whose layers are a norm and a mixer each."""
    hidden = F.embedding(tokens, model.backbone.embedding.weight)
    for block in model.backbone.layers:
        hidden = hidden + layer(block.mixer, rms_norm(hidden, block.norm.weight, block.norm.eps))
    norm = model.backbone.norm_f
    return F.linear(rms_norm(hidden, norm.weight, norm.eps), model.lm_head.weight)


# ---- the scan at full size -------------------------------------------------------------------------------------------


def linear_recurrence(a, b):
    """h_t = a_t h_{t-1} + b_t along the last dimension, by doubling: no loop over time. Overwrites a and b."""
    seqlen, shift = a.shape[-1], 1
    while shift < seqlen:
        b[..., shift:] += a[..., shift:] * b[..., :-shift].clone()
        a[..., shift:] *= a[..., :-shift].clone()
        shift *= 2
    return b


def scan_and_gradients(inputs, dout, row, elements=1 << 27):
    """The scan of batch entry `row` in float64 with softplus, and its gradients for dout: {name: tensor}.

    Channels go through in groups of at most `elements` states.
    """
    u, delta, z, dout = (tensor[row].double() for tensor in (inputs["u"], inputs["delta"], inputs["z"], dout))
    B, C = inputs["B"][row].double(), inputs["C"][row].double()
    A, D, bias = (inputs[name].double() for name in ("A", "D", "delta_bias"))
    dim, seqlen = u.shape
    results = {name: torch.empty_like(u) for name in ("out", "u", "delta", "z")}
    results.update(A=torch.empty_like(A), B=torch.zeros_like(B), C=torch.zeros_like(C))
    results.update(D=torch.empty_like(D), delta_bias=torch.empty_like(bias))
    step = max(1, elements // (seqlen * A.shape[1]))
    for first in range(0, dim, step):
        part = slice(first, first + step)
        raw = delta[part] + bias[part, None]
        dt, gate = F.softplus(raw, threshold=60.0), torch.sigmoid(z[part])
        decay = torch.exp(dt[:, None] * A[part, :, None])
        h = linear_recurrence(decay.clone(), (dt * u[part])[:, None] * B)
        y = (h * C).sum(1) + D[part, None] * u[part]
        results["out"][part] = y * z[part] * gate
        results["z"][part] = dout[part] * y * gate * (1 + z[part] * (1 - gate))
        dy = dout[part] * z[part] * gate
        results["C"] += (dy[:, None] * h).sum(0)
        # the gradient with respect to h_t runs backwards through the decay of step t + 1
        later = torch.cat([decay[..., 1:], torch.zeros_like(decay[..., :1])], -1).flip(-1)
        g = linear_recurrence(later, (dy[:, None] * C).flip(-1)).flip(-1)
        results["B"] += (g * (dt * u[part])[:, None]).sum(0)
        through_B = (g * B).sum(1)
        before = torch.cat([torch.zeros_like(h[..., :1]), h[..., :-1]], -1)
        through_decay = g * before * decay
        results["A"][part] = (through_decay * dt[:, None]).sum(-1)
        ddt = (through_decay * A[part, :, None]).sum(1) + through_B * u[part]
        results["u"][part] = D[part, None] * dy + through_B * dt
        results["delta"][part] = ddt * torch.sigmoid(raw)
        results["D"][part] = (dy * u[part]).sum(-1)
        results["delta_bias"][part] = results["delta"][part].sum(-1)
    return results
