"""The operator of double_backward.py on CUDA tensors: torch operators over blocks of steps and channels.

h_t = a_t h_{t-1} + x_t B_t with a_t = exp(dt_t A) and x_t = dt_t u_t. Let w be the gradient of the output, q_t what
reaches h_{t-1} from step t on: q_t = a_t g_t, where g_t = C_t w_t + q_{t+1} is the gradient of h_t. With a
prime for tangents,
    h'_t = a_t h'_{t-1} + a_t (dt_t A)' h_{t-1} + (x_t B_t)'
    g'_t = (C_t w_t)' + q'_{t+1} with q'_t = a_t g'_t + (dt_t A)' q_t
are recurrences with the same decays, and all results are sums of products of h, h', g, g', q and q'. These are computed
in blocks of steps, so that the memory for states, which is B L D N floats for all, stays small: h and h' once from the
first block on, for where each block starts, and again block by block, from the last one on, beside g and g'.
Letters: B batch, D channels, L length, N dstate, G groups of B and C; M = B G entries of d = D / G channels each.
"""

import typing

import torch

from mamba_ssm.ops._shared.recurrence import recur_

# States of a block, of which seven copies live at a time: enough to fill a GPU.
_BLOCK = 1 << 26
_STEPS = 16  # the fewest of a block, but for short sequences


class Core(typing.NamedTuple):
    """The scan's inputs, or tangents of them, in a block's layout."""

    u: torch.Tensor  # (L, M, 1, d)
    dt: torch.Tensor  # as u; as the states use it
    A: torch.Tensor  # (M, N, d)
    B: torch.Tensor  # (L, M, N, 1)
    C: torch.Tensor  # as B
    initial_state: torch.Tensor  # (M, N, d)


def goes_on(seq_idx: torch.Tensor, reverse: bool) -> torch.Tensor:
    """(B, L): whether the state before a step, in the order of the scan, belongs to the step's own sequence."""
    same = seq_idx[:, 1:] == seq_idx[:, :-1]
    first = torch.ones_like(seq_idx[:, :1], dtype=torch.bool)
    return torch.cat([same, first] if reverse else [first, same], dim=1)


def in_blocks(given, found, reverse):
    """Writes found, Tangents of given (see double_backward.py)."""
    (batch, dim, seqlen), (groups, dstate) = given.u.shape, given.B.shape[1:3]
    entries, channels = batch * groups, dim // groups

    def steps(tensor, *sizes):
        """(B, D, L) or (B, G, N, L) as (L, M, ...), in the order of the scan."""
        tensor = tensor.reshape(-1, seqlen).t()
        return (tensor.flip(0) if reverse else tensor).contiguous().view(seqlen, entries, *sizes)

    def rows(tensor):
        """A state, or A, as (M, N, d)."""
        if tensor is None:
            return given.A.new_zeros(entries, dstate, channels)
        return tensor.expand(batch, dim, dstate).reshape(entries, channels, dstate).transpose(1, 2).contiguous()

    def placed(u, dt, A, B, C, initial_state):
        lines = (steps(line, 1, channels) for line in (u, dt))
        matrices = (steps(matrix, dstate, 1) for matrix in (B, C))
        return Core(*lines, rows(A), *matrices, rows(initial_state))

    def back(tensor, out):
        out.copy_((tensor.flip(0) if reverse else tensor).flatten(1).t().view_as(out))

    def back_rows(tensor):
        return tensor.transpose(1, 2).reshape(batch, dim, dstate)

    core = placed(*given[:6])
    moved = placed(*(getattr(given, f"{name}_tangent") for name in given._fields[:6]))
    weights = [steps(line, 1, channels) for line in (given.dout, given.dout_tangent)]
    mask = None
    if given.seq_idx is not None:
        mask = goes_on(given.seq_idx, reverse).to(given.A.dtype).repeat_interleave(groups, dim=0)
        mask = steps(mask, 1, 1)
    lines = [torch.empty_like(core.u) for _ in range(3)]
    last_weights, last_state = rows(given.dlast_state), torch.empty_like(core.initial_state)
    grads = Core(*(torch.zeros_like(tensor) for tensor in core))
    for m, d in _columns(entries, channels, _BLOCK // (dstate * _STEPS)):
        row, line, matrix = (m, slice(None), d), (slice(None), m, slice(None), d), (slice(None), m)
        where = Core(line, line, row, matrix, matrix, row)
        part = _Part(
            *(Core(*(tensor[at] for tensor, at in zip(of, where, strict=True))) for of in (core, moved, grads)),
            *(tensor[line] for tensor in (*weights, *lines)),
            last_weights[row],
            None if mask is None else mask[matrix],
        )
        last_state[row] = _run(part, min(seqlen, max(1, _BLOCK // part.given.A.numel())))
    found.last_state_tangent.copy_(back_rows(last_state))
    found.dinitial_state_tangent.copy_(back_rows(grads.initial_state))
    torch.sum(back_rows(grads.A), 0, out=found.dA_tangent)
    results = found.du_tangent, found.ddelta_tangent, found.dB_tangent, found.dC_tangent
    written = (grads.u, grads.dt, grads.B, grads.C, *lines)
    for tensor, out in zip(written, (*results, found.out, found.out_tangent, found.ddelta), strict=True):
        back(tensor, out)


def _columns(entries, channels, most):
    """Slices of the entries and of their channels, of at most so many channels together."""
    most = max(1, most)
    together = max(1, most // max(1, channels))
    for m in range(0, entries, together):
        for d in range(0, channels, most):
            yield slice(m, m + together), slice(d, d + most)


class _Part(typing.NamedTuple):
    """Some channels: what is given, and views of the results (grads, which are added to, out, dout and ddt)."""

    given: Core
    change: Core
    grads: Core
    weight: torch.Tensor  # as u
    dweight: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    ddt: torch.Tensor
    last_weight: torch.Tensor  # as initial_state
    mask: torch.Tensor | None  # (L, M, 1, 1): zero where the state restarts

    def at(self, steps):
        """The same of some steps."""
        cores = (Core(of.u[steps], of.dt[steps], of.A, of.B[steps], of.C[steps], of.initial_state) for of in self[:3])
        lines = (line[steps] for line in self[3:8])
        return _Part(*cores, *lines, self.last_weight, None if self.mask is None else self.mask[steps])


def _run(part, steps):
    """Writes the results of some channels, so many steps at a time; returns the change of the last state."""
    blocks = [part.at(slice(t, t + steps)) for t in range(0, len(part.weight), steps)]
    starts = [(part.given.initial_state, part.change.initial_state)]
    space = part.given.A.new_empty(7, steps + 1, *part.given.A.shape)
    for block in blocks:
        states = _states(block, *starts[-1], space)
        starts.append((states.h[-1].clone(), states.dh[-1].clone()))
    reaching = part.last_weight, torch.zeros_like(part.last_weight)
    for block, start in reversed(list(zip(blocks, starts, strict=False))):
        if states is None:
            states = _states(block, *start, space)
        reaching = _gradients(block, states, *reaching, space)
        states = None
    part.grads.initial_state.copy_(reaching[1])
    return starts[-1][1]


class _States(typing.NamedTuple):
    """A block's states, (L, M, N, d); a leading d: the change."""

    a: torch.Tensor  # decays
    drate: torch.Tensor  # of log a
    h: torch.Tensor  # one more: the first is the state before the block
    dh: torch.Tensor


def _states(part, start, dstart, space):
    given, change = part.given, part.change
    count = len(part.weight)
    a, drate = space[:2, :count]
    h, dh = space[2:4, : count + 1]
    torch.mul(given.dt, given.A, out=a).exp_()
    if part.mask is not None:
        a *= part.mask
    torch.mul(change.dt, given.A, out=drate).addcmul_(given.dt, change.A)
    x, dx = _driving(part)
    h[0], dh[0] = start, dstart
    torch.mul(x, given.B, out=h[1:])
    recur_(a, h)
    torch.mul(a, h[:-1], out=dh[1:]).mul_(drate).addcmul_(dx, given.B).addcmul_(x, change.B)
    recur_(a, dh)
    return _States(a, drate, h, dh)


def _driving(part):
    """dt u and its change, (L, M, 1, d)."""
    (u, dt, *_), (du, ddt, *_) = part.given, part.change
    return dt * u, torch.mul(ddt, u).addcmul_(dt, du)


def _gradients(part, states, reaching, dreaching, space):
    """Writes a block's results. reaching: the gradient of the state behind it, dreaching its change; returns those of
    the state before it.
    """
    (u, dt, A, B, C, _), (du, ddt, dA, dB, dC, _), grads, w, dw = part[:5]
    a, drate = states.a, states.drate
    (before, h), (dbefore, dh) = ((of[:-1], of[1:]) for of in (states.h, states.dh))
    g, dg, q = space[4:7, : len(w)]
    torch.add(_over_states(h, dC), _over_states(dh, C), out=part.dout)
    part.out.copy_(_over_states(h, C))
    torch.mul(w, C, out=g)
    g[-1] += reaching
    recur_(a[1:], g, reverse=True)
    torch.mul(a, g, out=q)
    torch.mul(w, dC, out=dg).addcmul_(dw, C)
    dg[-1] += dreaching
    dg[:-1].addcmul_(drate[1:], q[1:])
    recur_(a[1:], dg, reverse=True)
    dq = drate.mul_(q).addcmul_(a, dg)
    reaching = q[0].clone(), dq[0].clone()

    spare = a  # for products
    grads.C.add_(torch.mul(dh, w, out=spare).addcmul_(h, dw).sum(3, keepdim=True))
    x, dx = _driving(part)
    grads.B.add_(torch.mul(dg, x, out=spare).addcmul_(g, dx).sum(3, keepdim=True))
    grad_x, dgrad_x = _over_states(g, B), _over_states(g, dB).add_(_over_states(dg, B))
    torch.mul(dt, dgrad_x, out=grads.u).addcmul_(ddt, grad_x)
    # The gradient of dt_t A is q_t h_{t-1}.
    dgrad_rate = dq.mul_(before).addcmul_(q, dbefore)
    grad_rate = q.mul_(before)
    torch.add(torch.mul(grad_rate, A, out=spare).sum(2, keepdim=True), u * grad_x, out=part.ddt)
    torch.sum(torch.mul(dgrad_rate, A, out=spare).addcmul_(grad_rate, dA), 2, keepdim=True, out=grads.dt)
    grads.dt.addcmul_(du, grad_x).addcmul_(u, dgrad_x)
    grads.A.add_(torch.mul(dgrad_rate, dt, out=spare).addcmul_(grad_rate, ddt).sum(0))
    return reaching


def _over_states(states, matrix):
    """The sum over N of states (L, M, N, d) times a matrix (L, M, N, 1), as (L, M, 1, d)."""
    return torch.matmul(matrix.transpose(2, 3), states)
