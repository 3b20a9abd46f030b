"""What every result is held against: plain torch, in float64 where the caller's tensors are. Imports no mamba_ssm.

Layers and models are given as modules with upstream's parameter names, whichever package they come from.
"""

import math
import sys

import torch
import torch.nn.functional as F

# ---- operators -------------------------------------------------------------------------------------------------------


def scan(u, delta, A, B, C, D=None, z=None, delta_bias=None):
    """The selective scan with softplus, step by step: u, delta, z (batch, D, L); B, C (batch, N, L).

    A (D, N), D and delta_bias (D) may also have the batch as their first dimension.
    """
    delta = F.softplus(delta + delta_bias[..., None])
    state = u.new_zeros(u.shape[0], u.shape[1], A.shape[-1])
    outputs = []
    for step in range(u.shape[2]):
        dt = delta[:, :, step, None]
        state = torch.exp(dt * A) * state + dt * u[:, :, step, None] * B[:, None, :, step]
        outputs.append((state * C[:, None, :, step]).sum(-1))
    out = torch.stack(outputs, -1) + D[..., None] * u
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


def mamba3_scan(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, MIMO_V=None, MIMO_Z=None, MIMO_Out=None):
    """Mamba-3's scan, by chunks: Q, K (batch, L, R, 1, N); V, Z (batch, L, H, P); ADT, DT, Trap (batch, L, H); Angles
    (batch, L, S); Q_bias, K_bias (H, R, N); MIMO_... (H, R, P).

    A step writes to the state with weight gamma, and the next step once more with its own nu: so later steps see it
    with the sum of both, and it sees itself with gamma alone.
    """
    rank, lam = Q.shape[2], torch.sigmoid(Trap)
    gamma, nu = lam * DT, (1 - lam) * DT
    later = F.pad(nu[:, 1:], (0, 0, 0, 1))
    angle = (math.pi * torch.tanh(Angles)[:, :, None] * DT[..., None]).cumsum(1)
    q, k = (turn(M + bias.transpose(0, 1), angle, MIMO_V is None) for M, bias in ((Q, Q_bias), (K, K_bias)))
    x = V[:, :, None].expand(-1, -1, rank, -1, -1) if MIMO_V is None else V[:, :, None] * MIMO_V.transpose(0, 1)
    y = _by_chunks(q, k * (gamma + later)[:, :, None, :, None], x, ADT)
    seen = torch.einsum("blrhn,blshn->blrsh", q, k) * later[:, :, None, None]
    y = y - torch.einsum("blrsh,blshp->blrhp", seen, x) + D[:, None] * x
    gate = F.silu(Z[:, :, None] if MIMO_Z is None else Z[:, :, None] * MIMO_Z.transpose(0, 1))
    return (y * gate * (1.0 if MIMO_Out is None else MIMO_Out.transpose(0, 1))).sum(2)


def mamba3_step(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, angle, ssm, k, v):
    """(out, new states) of a step of rank 1: mamba3_scan's arguments without L, and the four states."""
    angle = torch.remainder(angle + math.pi * torch.tanh(Angles)[:, None] * DT[..., None], 2 * math.pi)
    q, new_k = (
        turn(M[:, None] + bias.transpose(0, 1), angle[:, None], True)[:, 0] for M, bias in ((Q, Q_bias), (K, K_bias))
    )
    lam = torch.sigmoid(Trap)
    gamma, nu = ((weight * DT)[..., None, None] for weight in (lam, 1 - lam))
    before, now = v[..., None] * k[:, 0, :, None], V[..., None] * new_k[:, 0, :, None]
    ssm = torch.exp(ADT)[..., None, None] * (ssm + nu * before) + gamma * now
    y = (ssm * q[:, 0, :, None]).sum(-1) + D[:, None] * V
    return y * F.silu(Z), (angle, ssm, new_k, V)


def turn(x, angle, pairwise):
    """Q or K (batch, L, R, H, N) with pairs of entries, neighbours or N / 2 apart, turned: angle (batch, L, H, S)."""
    shape = (-1, 2) if pairwise else (2, -1)
    a, b = x.unflatten(-1, shape).unbind(-1 if pairwise else -2)
    angle = F.pad(angle, (0, a.shape[-1] - angle.shape[-1]))[:, :, None]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1 if pairwise else -2).flatten(-2)


def _by_chunks(q, k, x, log_decay):
    """y_t = sum over s <= t of exp(log_decay_{s+1} + ... + log_decay_t) (q_t k_s) x_s: q, k (batch, L, R, H, N), x
    (batch, L, R, H, P), log_decay (batch, L, H). 64 rows make a chunk.
    """
    seqlen, rank = q.shape[1:3]
    chunk = min(64 // rank, seqlen)
    q, k, x, log_decay = (
        F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -seqlen % chunk)).unflatten(1, (-1, chunk))
        for tensor in (q, k, x, log_decay)
    )
    total = log_decay.cumsum(2)  # (batch, chunks, chunk, H), from the chunk's beginning
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()[..., None]
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(~causal, -torch.inf).exp()
    weights = torch.einsum("bcirhn,bcjshn->bcirjsh", q, k) * between[:, :, :, None, :, None]
    y = torch.einsum("bcirjsh,bcjshp->bcirhp", weights, x)
    to_end = (total[:, :, -1:] - total).exp()[:, :, :, None, :, None]
    added, whole = torch.einsum("bcjshn,bcjshp->bchpn", k * to_end, x), total[:, :, -1].exp()[..., None, None]
    state, before = torch.zeros_like(added[:, 0]), []
    for i in range(added.shape[1]):
        before.append(state)
        state = whole[:, i] * state + added[:, i]
    y = y + torch.einsum("bcirhn,bchpn->bcirhp", q * total.exp()[:, :, :, None, :, None], torch.stack(before, 1))
    return y.flatten(1, 2)[:, :seqlen]


def cross_scan(x, x_proj_weight, dt_proj_weight, A, D, dt_bias):
    """Four scans over each image, along rows, columns and both backwards: x (batch, D, height, width)."""
    outs = []
    for image in x:
        rows, columns = image.flatten(1), image.transpose(1, 2).flatten(1)
        lines = torch.stack([rows, columns, rows.flip(1), columns.flip(1)])
        dstate = A.shape[2]
        dt, B, C = (x_proj_weight @ lines).split([dt_proj_weight.shape[2], dstate, dstate], dim=1)
        y = scan(lines, dt_proj_weight @ dt, A, B, C, D, None, dt_bias)
        rows, columns = y[0] + y[2].flip(1), y[1] + y[3].flip(1)
        outs.append(rows.view_as(image) + columns.unflatten(1, (x.shape[3], x.shape[2])).transpose(1, 2))
    return torch.stack(outs)


# ---- layers and models -----------------------------------------------------------------------------------------------


def _mamba_way(x, z, layer, suffix=""):
    """A direction of a Mamba layer before its output projection: x, z (batch, D, L)."""
    conv1d, x_proj, dt_proj = (getattr(layer, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    A_log, D = getattr(layer, f"A{suffix}_log"), getattr(layer, f"D{suffix}")
    x = conv(x, conv1d.weight[:, 0], conv1d.bias)
    dt_rank, dstate = dt_proj.weight.shape[1], A_log.shape[1]
    dt, B, C = F.linear(x.transpose(1, 2), x_proj.weight).split([dt_rank, dstate, dstate], dim=-1)
    dt = F.linear(dt, dt_proj.weight).transpose(1, 2)
    return scan(x, dt, -torch.exp(A_log), B.transpose(1, 2), C.transpose(1, 2), D, z, dt_proj.bias)


def mamba(layer, hidden):
    """A Mamba layer: (batch, L, d_model); with a direction of its own backwards where it has parameters for that."""
    x, z = F.linear(hidden, layer.in_proj.weight).transpose(1, 2).chunk(2, dim=1)
    out = _mamba_way(x, z, layer)
    if hasattr(layer, "A_b_log"):
        out = out + _mamba_way(x.flip(2), z.flip(2), layer, "_b").flip(2)
    return F.linear(out.transpose(1, 2), layer.out_proj.weight)


def _mamba2_way(zxBCdt, layer, width):
    """A Mamba-2 layer with one group and the norm after the gate, before its output projection: (batch, L, width)."""
    heads, channels = layer.A_log.shape[0], layer.conv1d.weight.shape[0]
    dstate = (channels - width) // 2
    z, xBC, dt = zxBCdt.split([width, channels, heads], dim=-1)
    xBC = conv(xBC.transpose(1, 2), layer.conv1d.weight[:, 0], layer.conv1d.bias).transpose(1, 2)
    x, B, C = xBC.split([width, dstate, dstate], dim=-1)
    A = -torch.exp(layer.A_log)
    out = ssd(x.unflatten(-1, (heads, -1)), dt, A, B[:, :, None], C[:, :, None], layer.D, layer.dt_bias).flatten(2)
    return gated_rms_norm(out, z, layer.norm.weight, layer.norm.eps)


def mamba2(layer, hidden):
    """A Mamba-2 layer: (batch, L, d_model); with a direction of its own backwards where it has parameters for that."""
    zxBCdt, width = F.linear(hidden, layer.in_proj.weight), layer.out_proj.weight.shape[1]
    out = _mamba2_way(zxBCdt, layer, width)
    if hasattr(layer, "backwards"):
        out = out + _mamba2_way(zxBCdt.flip(1), layer.backwards, width).flip(1)
    return F.linear(out, layer.out_proj.weight)


def hydra(layer, hidden):
    """A Hydra layer with one group: what is before a step, what is behind it, and the step itself by a diagonal."""
    heads, width = layer.A_log.shape[0], layer.out_proj.weight.shape[1]
    weight = layer.conv1d.weight[:, 0]
    channels, ahead = weight.shape[0], weight.shape[1] // 2
    matrices = (channels - width) // 2
    z, xBC, dt = F.linear(hidden, layer.in_proj.weight).split([width, channels, 2 * heads], dim=-1)
    xBC = conv(F.pad(xBC.transpose(1, 2), (0, ahead)), weight, layer.conv1d.bias)[..., ahead:].transpose(1, 2)
    x, *BC = xBC.split([width, matrices, matrices], dim=-1)
    y = (layer.D + F.linear(x, layer.fc_D.weight)).repeat_interleave(width // heads, -1) * x
    A, nothing = -torch.exp(layer.A_log), torch.zeros_like(layer.D)
    for back, (matrix, step) in enumerate(zip(BC, dt.chunk(2, dim=-1), strict=True)):
        given = x.unflatten(-1, (heads, -1)), step, *matrix[:, :, None].chunk(2, dim=-1)
        inner, step, B, C = (tensor.flip(1) for tensor in given) if back else given
        seen = F.pad(ssd(inner, step, A, B, C, nothing, layer.dt_bias).flatten(2)[:, :-1], (0, 0, 1, 0))
        y = y + (seen.flip(1) if back else seen)
    return F.linear(rms_norm(y, layer.norm.weight, layer.norm.eps) * F.silu(z), layer.out_proj.weight)


def mamba3(layer, hidden):
    """A Mamba-3 layer with one group and without norm: (batch, L, d_model)."""
    heads, rank, dstate = layer.B_bias.shape
    width = layer.out_proj.weight.shape[1]
    rest = layer.in_proj.weight.shape[0] - 2 * (width + rank * dstate) - 3 * heads
    sizes = [width, width, rank * dstate, rank * dstate, heads, heads, heads, rest]
    z, x, B, C, dt, A, trap, angles = F.linear(hidden, layer.in_proj.weight).split(sizes, dim=-1)
    Q, K = (
        rms_norm(matrix.unflatten(-1, (rank, 1, dstate)), norm.weight, norm.eps)
        for matrix, norm in ((C, layer.C_norm), (B, layer.B_norm))
    )
    dt = F.softplus(dt + layer.dt_bias)
    # upstream's wheels of May 2026 have softplus there, and none of this name
    heavy_tail = hasattr(sys.modules[type(layer).__module__], "heavy_tail_activation")
    rate = F.relu(A) + 1 / (1 - A.clamp(max=0)) if heavy_tail else F.softplus(A)
    mimo = [layer.mimo_x, layer.mimo_z, layer.mimo_o] if hasattr(layer, "mimo_x") else []
    x, z = x.unflatten(-1, (heads, -1)), z.unflatten(-1, (heads, -1))
    ADT = -rate.clamp(min=layer.A_floor) * dt
    y = mamba3_scan(Q, K, x, ADT, dt, trap, layer.C_bias, layer.B_bias, angles, layer.D, z, *mimo)
    return F.linear(y.flatten(2), layer.out_proj.weight)


def layer(module, hidden):
    marks = {"x_proj": mamba, "B_bias": mamba3, "fc_D": hydra}  # parameters that one kind has
    return next((make for mark, make in marks.items() if hasattr(module, mark)), mamba2)(module, hidden)


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

    B and C (batch, N, L) or (batch, G, N, L), with or without z. At most `elements` states are computed at once.
    """
    if inputs["B"].dim() == 4:
        return _of_groups(inputs, dout, row, elements)
    u, delta, dout = (tensor[row].double() for tensor in (inputs["u"], inputs["delta"], dout))
    z = inputs["z"][row].double() if "z" in inputs else None
    B, C = inputs["B"][row].double(), inputs["C"][row].double()
    A, D, bias = (inputs[name].double() for name in ("A", "D", "delta_bias"))
    dim, seqlen = u.shape
    results = {name: torch.empty_like(u) for name in ("out", "u", "delta", *(("z",) if z is not None else ()))}
    results.update(A=torch.empty_like(A), B=torch.zeros_like(B), C=torch.zeros_like(C))
    results.update(D=torch.empty_like(D), delta_bias=torch.empty_like(bias))
    step = max(1, elements // (seqlen * A.shape[1]))
    for first in range(0, dim, step):
        part = slice(first, first + step)
        raw = delta[part] + bias[part, None]
        dt = F.softplus(raw, threshold=60.0)
        decay = torch.exp(dt[:, None] * A[part, :, None])
        h = linear_recurrence(decay.clone(), (dt * u[part])[:, None] * B)
        y = (h * C).sum(1) + D[part, None] * u[part]
        out, dy = y, dout[part]
        if z is not None:
            gate = torch.sigmoid(z[part])
            out, dy = y * z[part] * gate, dout[part] * z[part] * gate
            results["z"][part] = dout[part] * y * gate * (1 + z[part] * (1 - gate))
        results["out"][part] = out
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


def _of_groups(inputs, dout, row, elements):
    """scan_and_gradients, a group of channels with its B and C after the other."""
    groups, channels = inputs["B"].shape[1], inputs["A"].shape[0] // inputs["B"].shape[1]
    found = []
    for group in range(groups):
        part = slice(group * channels, (group + 1) * channels)
        own = {
            name: tensor[part] if name in ("A", "D", "delta_bias") else tensor[:, part]
            for name, tensor in inputs.items()
        }
        own.update(B=inputs["B"][:, group], C=inputs["C"][:, group])
        found.append(scan_and_gradients(own, dout[:, part], row, elements))
    combine = {"B": torch.stack, "C": torch.stack}
    return {name: combine.get(name, torch.cat)([results[name] for results in found]) for name in found[0]}
