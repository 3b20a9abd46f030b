"""ONNX forms of the two scans, for mamba_ssm.utils.onnx. Importing this needs onnxscript.

In ONNX's standard operators the length is cut into chunks, and an ONNX Scan runs over the chunks, so that the graph has
the same size for every length. In onnxruntime's own operators a scan is one LinearAttention. Arithmetic is float32.
A chunk has at most the sequence's length: a decoding step computes one step, not a chunk of them.
Letters: B batch, L length, D channels, H heads, P headdim, G groups of B and C, R = D / G or H / G, N dstate, Q chunk.
"""

try:
    from onnxscript import FLOAT, graph, script
    from onnxscript import opset18 as op
    from onnxscript.values import Opset
except ImportError as error:
    raise ImportError('mamba_ssm.utils.onnx needs onnxscript: pip install "mamba_ssm[onnx]"') from error

_FUNCTIONS = Opset("mamba_ssm", 1)
_RUNTIME = Opset("com.microsoft", 1)
_CHUNK_MAMBA1 = 16  # log2 of it rounds, which _scan_chunks writes down
_CHUNK_MAMBA2 = 32
_FLOAT, _BOOL = 1, 9  # of onnx.TensorProto
_Tensor = FLOAT[...]
_Pair = tuple[_Tensor, _Tensor]  # which torch's exporter counts the outputs by


@script(_FUNCTIONS, default_opset=op)
def _scan_chunks(state, dt, x, B, C, A) -> _Pair:
    """state (B, G, R, N); dt, x (chunks, Q, B, G, R), x times dt; B, C (chunks, Q, B, G, N); A (G, R, N).

    Within a chunk h_t = a_t h_{t-1} + b_t is computed in log2(Q) rounds (Hillis and Steele, 1986): after the round of
    s steps, (a_t, b_t) stand for the last 2 s steps together. Products of decays never exceed 1, whatever dt is.
    """
    zero = op.Constant(value_float=0.0)
    one = op.Constant(value_float=1.0)
    last = op.Constant(value_ints=[-1])
    first = op.Constant(value_ints=[0])
    second = op.Constant(value_ints=[1])
    rest = op.Constant(value_ints=[0, 0, 0, 0])
    chunk_size = op.Shape(dt, start=1, end=2)
    s_1 = op.Min(op.Constant(value_ints=[1]), chunk_size)
    s_2 = op.Min(op.Constant(value_ints=[2]), chunk_size)
    s_4 = op.Min(op.Constant(value_ints=[4]), chunk_size)
    s_8 = op.Min(op.Constant(value_ints=[8]), chunk_size)
    later_1 = op.Concat(s_1, rest, op.Neg(s_1), rest, axis=0)  # pads that move steps so much later in the chunk
    later_2 = op.Concat(s_2, rest, op.Neg(s_2), rest, axis=0)
    later_4 = op.Concat(s_4, rest, op.Neg(s_4), rest, axis=0)
    later_8 = op.Concat(s_8, rest, op.Neg(s_8), rest, axis=0)

    @graph()
    def chunk(h, dt_c, x_c, B_c, C_c):
        a = op.Exp(op.Mul(op.Unsqueeze(dt_c, last), A))
        b = op.Mul(op.Unsqueeze(x_c, last), op.Unsqueeze(B_c, op.Constant(value_ints=[-2])))
        a_0 = op.Slice(a, first, second, first)
        b_0 = op.Slice(b, first, second, first)
        b = op.Concat(op.Add(b_0, op.Mul(a_0, h)), op.Slice(b, second, chunk_size, first), axis=0)
        b = op.Add(b, op.Mul(a, op.Pad(b, later_1, zero)))
        a = op.Mul(a, op.Pad(a, later_1, one))
        b = op.Add(b, op.Mul(a, op.Pad(b, later_2, zero)))
        a = op.Mul(a, op.Pad(a, later_2, one))
        b = op.Add(b, op.Mul(a, op.Pad(b, later_4, zero)))
        a = op.Mul(a, op.Pad(a, later_4, one))
        b = op.Add(b, op.Mul(a, op.Pad(b, later_8, zero)))
        y = op.Squeeze(op.MatMul(b, op.Unsqueeze(C_c, last)), last)
        h_last = op.Gather(b, op.Constant(value_int=-1), axis=0)
        return h_last, y

    last_state, out = op.Scan(state, dt, x, B, C, body=chunk, num_scan_inputs=4)
    return out, last_state


@script(_FUNCTIONS, default_opset=op)
def _ssd_chunks(state, exponents, x, B, C, ones) -> _Pair:
    """state (B, G, R, N, P); exponents dt A (chunks, B, G, R, Q); x times dt (chunks, B, G, R, Q, P); B, C
    (chunks, B, G, Q, N); ones (Q, Q).

    Mamba-2's matrix form of a chunk (arXiv 2405.21060, section 6): its steps see each other through C B^T, masked by
    the products of decays between two steps, and what came before through the state.
    """
    causal = op.Cast(op.Trilu(ones, upper=0), to=_BOOL)
    never = op.Constant(value_float=float("-inf"))
    last = op.Constant(value_ints=[-1])

    @graph()
    def chunk(S, dA, x_c, B_c, C_c):
        total = op.CumSum(dA, op.Constant(value_int=-1))
        row = op.Unsqueeze(total, last)
        between = op.Sub(row, op.Unsqueeze(total, op.Constant(value_ints=[-2])))
        decay = op.Exp(op.Where(causal, between, never))
        C_r = op.Unsqueeze(C_c, op.Constant(value_ints=[2]))
        B_t = op.Unsqueeze(op.Transpose(B_c, perm=[0, 1, 3, 2]), op.Constant(value_ints=[2]))
        y = op.MatMul(op.Mul(op.MatMul(C_r, B_t), decay), x_c)
        y = op.Add(y, op.Mul(op.Exp(row), op.MatMul(C_r, S)))
        whole = op.Gather(row, op.Constant(value_ints=[-1]), axis=3)
        added = op.MatMul(B_t, op.Mul(x_c, op.Exp(op.Sub(whole, row))))
        S_last = op.Add(op.Mul(op.Exp(whole), S), added)
        return S_last, y

    last_state, out = op.Scan(state, exponents, x, B, C, body=chunk, num_scan_inputs=4)
    return out, last_state


@script(_FUNCTIONS, default_opset=op)
def _linear_attention(query, key, value, state, decay, heads: int) -> _Pair:
    """onnxruntime's: S_t = exp(decay_t) S_{t-1} + key_t value_t^T, out_t = query_t^T S_t. All (B, L, heads * width)."""
    out, last_state = _RUNTIME.LinearAttention(
        query, key, value, state, decay, q_num_heads=heads, kv_num_heads=heads, scale=1.0, update_rule="gated"
    )
    return out, last_state


@script(_FUNCTIONS, default_opset=op)
def _causal_conv(x, weight, bias, state, activation: str) -> _Pair:
    """onnxruntime's: x (B, D, L), weight (D, 1, W), bias (D), state (B, D, W - 1)."""
    out, last_state = _RUNTIME.CausalConvWithState(x, weight, bias, state, activation=activation)
    return out, last_state


# ---- what both take and give -----------------------------------------------------------------------------------------


class CannotExport(ValueError):
    """What an operator of a model was called with has no ONNX form."""


def _refuse_packed(name, seq_idx):
    if seq_idx is not None:
        raise CannotExport(f"onnx.export: {name} with seq_idx has no ONNX form: give one sequence a row")


def _ints(*values):
    return op.Constant(value_ints=list(values))


def _float(tensor):
    return None if tensor is None else op.Cast(tensor, to=_FLOAT)


def _size(tensor, dim):
    return op.Shape(tensor, start=dim, end=dim + 1)


def _reversed(tensor, dim, reverse):
    """tensor, with reverse from the last step to the first."""
    if tensor is None or not reverse:
        return tensor
    return op.Slice(tensor, _ints(-1), _ints(-(2**63)), _ints(dim), _ints(-1))


def _chunks(length, most):
    """(chunk, count, missing), each (1): steps of a chunk, number of chunks, steps that the last one lacks."""
    chunk = op.Max(op.Min(length, _ints(most)), _ints(1))
    count = op.Div(op.Sub(op.Add(length, chunk), _ints(1)), chunk)
    return chunk, count, op.Sub(op.Mul(count, chunk), length)


def _cut(tensor, rank, chunks):
    """(L, ...) as (count, chunk, ...), with zeros behind the last step: they decay nothing and add nothing."""
    chunk, count, missing = chunks
    before, after = [0] * rank, [0] * (rank - 1)
    padded = op.Pad(tensor, op.Concat(_ints(*before), missing, _ints(*after), axis=0))
    return op.Reshape(padded, op.Concat(count, chunk, op.Shape(tensor, start=1), axis=0))


def _zeros(*sizes):
    return op.Expand(op.Constant(value_float=0.0), op.Concat(*sizes, axis=0))


def _step_sizes(dt, bias, softplus):
    """bias broadcasts to dt."""
    dt = _float(dt) if bias is None else op.Add(_float(dt), bias)
    return op.Softplus(dt) if softplus else dt


def _finished(out, skipped, z, like):
    """(out + skipped) silu(z), in the dtype of like."""
    if skipped is not None:
        out = op.Add(out, skipped)
    if z is not None:
        z = _float(z)
        out = op.Mul(out, op.Mul(z, op.Sigmoid(z)))
    return op.CastLike(out, like)


# ---- Mamba-1 ---------------------------------------------------------------------------------------------------------


def selective_scan(by_runtime):
    """The translation of mamba_ssm::selective_scan."""

    def translate(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        initial_state,
        seq_idx,
        delta_softplus: bool,
        return_last_state: bool,
        return_checkpoints: bool,
        reverse: bool = False,
    ):
        _refuse_packed("selective_scan_fn", seq_idx)
        for name, matrix in ("B", B), ("C", C):
            if len(matrix.shape) == 2:
                raise CannotExport(
                    f"onnx.export: selective_scan_fn has an ONNX form for {name} (B, N, L) or (B, G, N, L), "
                    f"got a constant of shape ({', '.join(map(str, matrix.shape))}): expand it over batch and length"
                )
        scan = _selective_scan_by_runtime if by_runtime else _selective_scan_by_chunks
        bias = None if delta_bias is None else op.Unsqueeze(delta_bias, _ints(1))
        x, dt = _float(u), _step_sizes(delta, bias, delta_softplus)
        if initial_state is None:
            dim, dstate = A.shape
            initial_state = _zeros(_size(u, 0), _ints(dim, dstate))
        steps = (_reversed(tensor, -1, reverse) for tensor in (dt, op.Mul(dt, x), _float(B), _float(C)))
        groups = B.shape[1] if len(B.shape) == 4 else None
        out, last_state = scan(A, initial_state, *steps, groups)
        skipped = None if D is None else op.Mul(x, op.Unsqueeze(D, _ints(1)))
        return _finished(_reversed(out, -1, reverse), skipped, z, u), last_state, last_state

    return translate


def _grouped(B, C, groups):
    return (op.Unsqueeze(B, _ints(1)), op.Unsqueeze(C, _ints(1)), 1) if groups is None else (B, C, groups)


def _selective_scan_by_chunks(A, state, dt, x, B, C, groups):
    """A (D, N), state (B, D, N); dt, x (B, D, L), x times dt; B, C (B, G, N, L), or (B, N, L) if groups is None."""
    dim, dstate = A.shape
    B, C, groups = _grouped(B, C, groups)
    length = _size(dt, 2)
    chunks = _chunks(length, _CHUNK_MAMBA1)
    heads = _ints(0, 0, groups, dim // groups)
    dt, x = (_cut(op.Reshape(op.Transpose(t, perm=[2, 0, 1]), heads), 4, chunks) for t in (dt, x))
    B, C = (_cut(op.Transpose(t, perm=[3, 0, 1, 2]), 4, chunks) for t in (B, C))
    A = op.Reshape(A, _ints(groups, dim // groups, dstate))
    state = op.Reshape(state, _ints(0, groups, dim // groups, dstate))
    out, state = _scan_chunks(state, dt, x, B, C, A)
    out = op.Reshape(out, op.Concat(_ints(-1), _size(dt, 2), _ints(dim), axis=0))
    out = op.Slice(out, _ints(0), length, _ints(0))
    return op.Transpose(out, perm=[1, 2, 0]), op.Reshape(state, _ints(0, dim, dstate))


def _selective_scan_by_runtime(A, state, dt, x, B, C, groups):
    """Each channel is a head of LinearAttention with N keys and one value."""
    dim, dstate = A.shape
    B, C, groups = _grouped(B, C, groups)
    dt, x = (op.Transpose(t, perm=[0, 2, 1]) for t in (dt, x))
    packed = op.Concat(op.Shape(dt, start=0, end=2), _ints(dim * dstate), axis=0)
    per_channel = op.Concat(op.Shape(dt, start=0, end=2), _ints(groups, dim // groups, dstate), axis=0)

    def keys(matrix):
        matrix = op.Unsqueeze(op.Transpose(matrix, perm=[0, 3, 1, 2]), _ints(3))
        return op.Reshape(op.Expand(matrix, per_channel), packed)

    decay = op.Reshape(op.Mul(op.Unsqueeze(dt, _ints(-1)), A), packed)
    out, state = _linear_attention(keys(C), keys(B), x, op.Unsqueeze(state, _ints(-1)), decay, heads=dim)
    return op.Transpose(out, perm=[0, 2, 1]), op.Squeeze(state, _ints(-1))


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def ssd(by_runtime):
    """The translation of mamba_ssm::ssd."""

    def translate(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        return_final_states: bool,
        reverse: bool = False,
    ):
        _refuse_packed("mamba_chunk_scan_combined", seq_idx)
        scan = _ssd_by_runtime if by_runtime else _ssd_by_chunks
        heads, headdim = x.shape[2:]
        wide, dt = _float(x), _step_sizes(dt, dt_bias, dt_softplus)
        if dt_min > 0 or not dt_softplus:
            dt = op.Max(dt, op.Constant(value_float=dt_min))
        if dt_max != float("inf"):
            dt = op.Min(dt, op.Constant(value_float=dt_max))
        if initial_states is None:
            initial_states = _zeros(_size(x, 0), _ints(heads, headdim, B.shape[3]))
        steps = op.Mul(dt, A), op.Mul(wide, op.Unsqueeze(dt, _ints(-1))), _float(B), _float(C)
        states = op.Transpose(initial_states, perm=[0, 1, 3, 2])
        out, states = scan(states, *(_reversed(t, 1, reverse) for t in steps), (heads, headdim, *B.shape[2:]))
        skipped = None if D is None else op.Mul(wide, D if len(D.shape) == 2 else op.Unsqueeze(D, _ints(1)))
        return _finished(_reversed(out, 1, reverse), skipped, z, x), op.Transpose(states, perm=[0, 1, 3, 2])

    return translate


def _ssd_by_chunks(states, exponents, x, B, C, sizes):
    """states (B, H, N, P); exponents dt A (B, L, H); x times dt (B, L, H, P); B, C (B, L, G, N); sizes H, P, G, N."""
    heads, headdim, groups, dstate = sizes
    length = _size(x, 1)
    chunks = _chunks(length, _CHUNK_MAMBA2)
    grouped = op.Reshape(exponents, _ints(0, 0, groups, heads // groups))
    grouped = op.Transpose(_cut(op.Transpose(grouped, perm=[1, 0, 2, 3]), 4, chunks), perm=[0, 2, 3, 4, 1])
    x = op.Reshape(x, _ints(0, 0, groups, heads // groups, headdim))
    x = op.Transpose(_cut(op.Transpose(x, perm=[1, 0, 2, 3, 4]), 5, chunks), perm=[0, 2, 3, 4, 1, 5])
    B, C = (op.Transpose(_cut(op.Transpose(t, perm=[1, 0, 2, 3]), 4, chunks), perm=[0, 2, 3, 1, 4]) for t in (B, C))
    ones = op.Expand(op.Constant(value_float=1.0), op.Concat(chunks[0], chunks[0], axis=0))
    states = op.Reshape(states, _ints(0, groups, heads // groups, dstate, headdim))
    out, states = _ssd_chunks(states, grouped, x, B, C, ones)
    # (count, B, G, R, Q, P) -> (B, L, H, P)
    out = op.Transpose(out, perm=[1, 0, 4, 2, 3, 5])
    out = op.Reshape(out, op.Concat(_size(exponents, 0), _ints(-1, heads, headdim), axis=0))
    out = op.Slice(out, _ints(0), length, _ints(1))
    return out, op.Reshape(states, _ints(0, heads, dstate, headdim))


def _ssd_by_runtime(states, exponents, x, B, C, sizes):
    heads, headdim, groups, dstate = sizes
    start = op.Shape(x, start=0, end=2)
    per_head = op.Concat(start, _ints(groups, heads // groups, dstate), axis=0)

    def keys(matrix):
        matrix = op.Expand(op.Unsqueeze(matrix, _ints(3)), per_head)
        return op.Reshape(matrix, op.Concat(start, _ints(heads * dstate), axis=0))

    values = op.Reshape(x, _ints(0, 0, heads * headdim))
    out, states = _linear_attention(keys(C), keys(B), values, states, exponents, heads=heads)
    return op.Reshape(out, _ints(0, 0, heads, headdim)), states


# ---- the convolution -------------------------------------------------------------------------------------------------


def causal_conv1d(by_runtime):
    """The translation of mamba_ssm::causal_conv1d."""

    def translate(
        x,
        weight,
        bias,
        seq_idx,
        initial_states,
        return_final_states: bool,
        silu: bool,
        reverse: bool = False,
    ):
        _refuse_packed("causal_conv1d_fn", seq_idx)
        dim, width = weight.shape
        steps, taps = _reversed(_float(x), 2, reverse), op.Unsqueeze(_float(weight), _ints(1))
        bias = _zeros(_ints(dim)) if bias is None else _float(bias)
        if initial_states is None:
            state = _zeros(_size(x, 0), _ints(dim, width - 1))
        else:
            state = _reversed(_float(initial_states), 2, reverse)
        if by_runtime:
            out, state = _causal_conv(steps, taps, bias, state, activation="silu" if silu else "none")
        else:
            inputs = op.Concat(state, steps, axis=2)
            out = op.Conv(inputs, taps, bias, group=dim)
            state = op.Slice(inputs, _ints(1 - width), _ints(2**63 - 1), _ints(2))
            out = op.Mul(out, op.Sigmoid(out)) if silu else out
        return tuple(op.CastLike(_reversed(tensor, 2, reverse), x) for tensor in (out, state))

    return translate
