"""The selective scan's second derivative in closed form.

h_t = a_t h_{t-1} + x_t B_t with a_t = exp(dt_t A) and x_t = dt_t u_t, and the gradient that reaches h_t is
g_t = C_t dout_t + a_{t+1} g_{t+1}. In a direction, in which a prime stands for the change,
    h'_t = a_t h'_{t-1} + a_t (dt_t A)' h_{t-1} + x'_t B_t + x_t B'_t
    g'_t = a_{t+1} g'_{t+1} + a_{t+1} (dt_{t+1} A)' g_{t+1} + C'_t dout_t
are recurrences with the same decays, and all results are sums of their products. These are computed in blocks of steps,
so that the memory for states, which is B L D N floats for all, stays small: h and h' once from the first block on, for
where each block starts, and again block by block, from the last one on, beside g and g'.
Letters: B batch, D channels, L length, N dstate, G groups of B and C; M = B G entries of d = D / G channels each.
"""

import typing

import torch

from mamba_ssm.ops._shared.recurrence import recur_

# States of a block, of which ten copies live at a time: few enough for a CPU's caches, enough to fill a GPU.
_BLOCK, _BLOCK_CUDA = 1 << 19, 1 << 26
_STEPS = 16  # the fewest of a block, but for short sequences


class Core(typing.NamedTuple):
    """The scan's inputs without what goes before and behind it, all of one dtype."""

    u: torch.Tensor  # (B, D, L); in a block (L, M, d)
    dt: torch.Tensor  # as u; as the states use it
    A: torch.Tensor  # (D, N); (M, d, N)
    B: torch.Tensor  # (B, G, N, L); (L, M, 1, N)
    C: torch.Tensor  # as B
    initial_state: torch.Tensor | None  # (B, D, N); (M, d, N)


def goes_on(seq_idx: torch.Tensor, reverse: bool) -> torch.Tensor:
    """(B, L): whether the state before a step, in the order of the scan, belongs to the step's own sequence."""
    same = seq_idx[:, 1:] == seq_idx[:, :-1]
    first = torch.ones_like(seq_idx[:, :1], dtype=torch.bool)
    return torch.cat([same, first] if reverse else [first, same], dim=1)


def change_of_gradients(core, direction, dout, dlast_state, seq_idx, reverse):
    """How out (B, D, L), the last state (B, D, N) and the gradients of core for dout and dlast_state change where core
    changes by direction, in which None is zero.
    """
    shape = batch, dim, seqlen = core.u.shape
    groups, dstate = core.B.shape[1:3]
    states = batch, dim, dstate
    if core.u.numel() == 0:  # the gradient of the initial state is dlast_state
        zeros = Core(*(None if tensor is None else torch.zeros_like(tensor) for tensor in core))
        last_state = core.A.new_zeros(states) if direction.initial_state is None else direction.initial_state
        return torch.zeros_like(core.u), last_state, zeros

    def steps(tensor):
        """(B, D, L) or (B, G, N, L) as (L, M, d or N), in the order of the scan."""
        tensor = tensor.reshape(batch * groups, -1, seqlen).permute(2, 0, 1)
        return (tensor.flip(0) if reverse else tensor).contiguous()

    def rows(tensor):
        """A state, or A, as (M, d, N)."""
        if tensor is None:
            return core.A.new_zeros(batch * groups, dim // groups, dstate)
        return tensor.expand(states).reshape(batch * groups, dim // groups, dstate)

    def placed(given):
        return Core(
            steps(given.u), steps(given.dt), rows(given.A), steps(given.B), steps(given.C), rows(given.initial_state)
        )

    def back(tensor, shape):
        return (tensor.flip(0) if reverse else tensor).permute(1, 2, 0).reshape(shape)

    given = placed(core)
    changes = [torch.zeros_like(of) if tensor is None else tensor for tensor, of in zip(direction[:5], core[:5])]  # noqa: B905
    moved = placed(Core(*changes, direction.initial_state))
    weight, last_weight, mask = steps(dout), rows(dlast_state), None
    if seq_idx is not None:
        mask = goes_on(seq_idx, reverse).to(core.A.dtype).repeat_interleave(groups, dim=0)[:, None]
        mask = steps(mask.reshape(batch, groups, seqlen))[..., None]
    out, last_state = torch.empty_like(weight), torch.empty_like(last_weight)
    grads = Core(*(torch.zeros_like(tensor) for tensor in given))
    most = _BLOCK_CUDA if core.u.is_cuda else _BLOCK
    for m, d in _columns(batch * groups, dim // groups, most // (dstate * _STEPS)):
        where = Core((slice(None), m, d), (slice(None), m, d), (m, d), (slice(None), m), (slice(None), m), (m, d))
        part = _Part(
            *(Core(*(tensor[at] for tensor, at in zip(of, where, strict=True))) for of in (given, moved, grads)),
            weight[where.u],
            last_weight[where.A],
            None if mask is None else mask[where.B],
            out[where.u],
        )
        last_state[where.A] = _run(part, max(1, most // part.given.A.numel()))
    dA, dinitial = grads.A.view(states).sum(0), grads.initial_state.view(states)
    du, ddt = back(grads.u, shape), back(grads.dt, shape)
    result = Core(du, ddt, dA, back(grads.B, core.B.shape), back(grads.C, core.C.shape), dinitial)
    return back(out, shape), last_state.view(states), result


def _columns(entries, channels, most):
    """Slices of the entries and of their channels, of at most so many channels together."""
    most = max(1, most)
    together = max(1, most // max(1, channels))
    for m in range(0, entries, together):
        for d in range(0, channels, most):
            yield slice(m, m + together), slice(d, d + most)


class _Part(typing.NamedTuple):
    """Some channels: what is given, and views of the results (grads, which are added to, and out)."""

    given: Core
    change: Core
    grads: Core
    weight: torch.Tensor  # dout, as u
    last_weight: torch.Tensor  # dlast_state, as initial_state
    mask: torch.Tensor | None  # (L, M, 1, 1): zero where the state restarts
    out: torch.Tensor

    def at(self, steps):
        """The same of some steps."""
        mask = None if self.mask is None else self.mask[steps]
        cut = (Core(of.u[steps], of.dt[steps], of.A, of.B[steps], of.C[steps], of.initial_state) for of in self[:3])
        return _Part(*cut, self.weight[steps], self.last_weight, mask, self.out[steps])


def _run(part, steps):
    """Writes the results of some channels, so many steps at a time; returns the change of the last state."""
    blocks = [slice(t, t + steps) for t in range(0, len(part.weight), steps)]
    starts = [(part.given.initial_state, part.change.initial_state)]
    for block in blocks:
        states = _states(part.at(block), *starts[-1])
        starts.append((states.h[-1].clone(), states.dh[-1].clone()))
    reaching = part.last_weight, torch.zeros_like(part.last_weight)
    for block, start in reversed(list(zip(blocks, starts, strict=False))):
        if states is None:
            states = _states(part.at(block), *start)
        reaching = _gradients(part.at(block), states, *reaching)
        states = None
    part.grads.initial_state.copy_(reaching[1])
    return starts[-1][1]


class _States(typing.NamedTuple):
    """A block's states, (L, M, d, N); a leading d: the change."""

    a: torch.Tensor  # decays
    drate: torch.Tensor  # of log a
    h: torch.Tensor  # one more: the first is the state before the block
    dh: torch.Tensor
    decayed: torch.Tensor  # a_t h_{t-1}


def _states(part, start, dstart):
    given, change = part.given, part.change
    a = torch.exp_(given.dt[..., None] * given.A)
    if part.mask is not None:
        a *= part.mask
    drate = (change.dt[..., None] * given.A).addcmul_(given.dt[..., None], change.A)
    x, dx = _driving(part)
    B, dB = given.B.unsqueeze(2), change.B.unsqueeze(2)
    h = a.new_empty(len(a) + 1, *a.shape[1:])
    h[0] = start
    torch.mul(x, B, out=h[1:])
    recur_(a, h)
    decayed = a * h[:-1]
    dh = torch.empty_like(h)
    dh[0] = dstart
    torch.mul(drate, decayed, out=dh[1:]).addcmul_(dx, B).addcmul_(x, dB)
    recur_(a, dh)
    return _States(a, drate, h, dh, decayed)


def _driving(part):
    """dt u and its change, (L, M, d, 1)."""
    (u, dt, *_), (du, ddt, *_) = part.given, part.change
    return (dt * u)[..., None], (ddt * u + dt * du)[..., None]


def _gradients(part, states, reaching, dreaching):
    """Writes a block's results. reaching: the gradient of the state behind it, dreaching its change; returns those of
    the state before it.
    """
    (u, dt, A, *_), (du, ddt, dA, *_), grads, weight = part[:4]
    B, C, dB, dC = (matrix.unsqueeze(2) for matrix in (*part.given[3:5], *part.change[3:5]))
    a, drate, h, dh, decayed = states
    part.out.copy_(_over_states(h[1:], dC) + _over_states(dh[1:], C))
    grads.C.add_(_over_channels(weight, dh[1:]))

    g = weight[..., None] * C
    g[-1] += reaching
    recur_(a[1:], g, reverse=True)
    a_g = a * g  # what reaches h_{t-1}
    dg = weight[..., None] * dC
    dg[-1] += dreaching
    dg[:-1].addcmul_(drate[1:], a_g[1:])
    recur_(a[1:], dg, reverse=True)

    x, dx = (line.squeeze(3) for line in _driving(part))
    grad_x, dgrad_x = _over_states(g, B), _over_states(g, dB) + _over_states(dg, B)
    grads.B.add_(_over_channels(dx, g) + _over_channels(x, dg))
    before = a_g[0].clone(), torch.addcmul(a[0] * dg[0], drate[0], a_g[0])
    # The gradient of dt_t A is a_t g_t h_{t-1}.
    dgrad_rate = decayed.mul_(dg).addcmul_(a_g, dh[:-1])
    grad_rate = a_g.mul_(h[:-1])
    dgrad_rate.addcmul_(grad_rate, drate)
    grads.u.copy_(ddt * grad_x + dt * dgrad_x)
    dgrad_dt = torch.einsum("lmdn,mdn->lmd", dgrad_rate, A) + torch.einsum("lmdn,mdn->lmd", grad_rate, dA)
    grads.dt.copy_(dgrad_dt + du * grad_x + u * dgrad_x)
    grads.A.add_(torch.einsum("lmdn,lmd->mdn", dgrad_rate, dt) + torch.einsum("lmdn,lmd->mdn", grad_rate, ddt))
    return before


def _over_states(states, matrix):
    """The sum over N of states (L, M, d, N) times a matrix (L, M, 1, N), as (L, M, d)."""
    return torch.matmul(states, matrix.transpose(2, 3)).squeeze(3)


def _over_channels(line, states):
    """The sum over d of states (L, M, d, N) times (L, M, d), as (L, M, N)."""
    return torch.matmul(line.unsqueeze(2), states).squeeze(2)
