"""FLOPs of every operator, for torch.utils.flop_counter, which sees an operator as one call and not what is inside.

As in torch's own formulas a multiply-add is two FLOPs, what is done element by element is not counted, masks save
nothing, and a product's backward is two products; what a kernel computes again in backward is not counted, so that
forward and backward are the model's FLOPs.

| what | FLOPs | as |
|---|---|---|
| selective scan | 9 B L D N | exp(dt A), dt B u, h and C h, element by element [1] |
| SSD | B L (2 Q P + 4 N P) a head, 2 B L Q N a group | products of chunks of Q = 64 steps [2] |
| Mamba-3 | B L (2 Q N + 2 Q P + 4 N P) a head and rank | the same, of Q = 64 rows; each head has its own B and C |
| one step | 4 B N P a head and rank | x B^T and h C; Mamba-1's, with decays of each channel: 9 B D N |
| convolution | 2 W B L D | |

[1] The count in state-spaces/mamba, issue 110. [2] arXiv 2405.21060, section 6; in Mamba-3 a step has a row a rank.
Letters: B batch, L length, D channels, N dstate, W width, H heads, P headdim, G groups, R ranks.
"""

import math

CHUNK = 64  # of the kernels
_known: dict = {}  # operator -> its FLOPs
_registries: list = []  # torch's, once it is told


def register_flops() -> None:
    """Tells torch.utils.flop_counter the FLOPs of this package's operators. Call it before a counter is made.

    Not when the package is imported: torch's counter imports triton where that is installed.
    """
    import torch.utils.flop_counter as flop_counter

    if not _registries:
        _registries.append(flop_counter.flop_registry)
    flop_counter.flop_registry.update(_known)


def remember(packet, names):
    """Keeps the formula of the operator `packet` (torch.ops.mamba_ssm.NAME), whose arguments have these names."""
    name = packet.__name__.removesuffix("_below_autograd")
    backward = name.endswith("_backward")
    formula = FORMULAS[name.removesuffix("_backward")]

    def flops(*arguments, **outputs):
        given = dict(zip(names, arguments, strict=False))  # torch drops trailing defaults
        return formula(given) * (2 if backward else 1)

    _known[packet] = flops
    for registry in _registries:  # not by register_flop_formula: torch 2.2's takes aten's packets alone
        registry[packet] = flops


def _scan(batch, seqlen, dim, dstate):
    return 9 * batch * seqlen * dim * dstate


def _ssd(batch, seqlen, nheads, headdim, ngroups, dstate):
    chunk = min(CHUNK, seqlen)
    of_head = 2 * chunk * headdim + 4 * dstate * headdim
    return batch * seqlen * (nheads * of_head + ngroups * 2 * chunk * dstate)


def _mamba3(batch, seqlen, rank, nheads, headdim, dstate):
    rows = min(CHUNK, seqlen * rank)
    return batch * seqlen * rank * nheads * (2 * rows * (dstate + headdim) + 4 * dstate * headdim)


def _convolution(columns, weight):
    """columns: steps of all sequences; weight (D, W) or (D, 1, W)."""
    return 2 * columns * weight.numel()


def _product(columns, *weights):
    return 2 * columns * sum(weight.numel() for weight in weights)


def _selective_scan(given):
    batch, dim, seqlen = given["u"].shape
    return _scan(batch, seqlen, dim, given["A"].shape[1])


def _selective_scan_double(given):
    """Half of selective_scan_double_backward: the tangent of each product, of forward and backward, is two products."""
    return 3 * _selective_scan(given)


def _causal_conv1d(given):
    return 2 * given["x"].numel() * given["weight"].shape[-1]


def _linear(given):
    return 2 * given["x"].numel() * given["weight"].shape[0]


def _selective_state_update(given):
    state, x, A = given["state"], given["x"], given["A"]
    dstate = state.shape[-1]
    return (9 if A.dim() == 2 else 4) * x.numel() * dstate


def _ssd_of(given):
    batch, seqlen, nheads, headdim = given["x"].shape
    return _ssd(batch, seqlen, nheads, headdim, *given["B"].shape[2:])


def _ssd_varlen_states(given):
    """The states alone: x B^T."""
    return 2 * given["x"].numel() * given["B"].shape[-1]


def _mamba3_scan(given):
    batch, seqlen, rank, _, dstate = given["Q"].shape
    return _mamba3(batch, seqlen, rank, *given["V"].shape[2:], dstate)


def _mamba3_step(given):
    rank, dstate = given["Q_bias"].shape[1:]
    return 4 * given["V"].numel() * rank * dstate


def _mamba3_block(given):
    batch, seqlen = given["zxBCdt"].shape[:2]
    nheads, rank, dstate = given["B_bias"].shape
    return _mamba3(batch, seqlen, rank, nheads, given["headdim"], dstate)


def _mamba3_block_step(given):
    nheads, rank, dstate = given["B_bias"].shape
    return 4 * given["zxBCdt"].shape[0] * rank * nheads * given["v_state"].shape[-1] * dstate


def _inner(columns, given, suffix=""):
    """A Mamba block's convolution, its projections of the scan's arguments, and the scan, in one direction."""
    dim, dstate = given["A" + suffix].shape
    return (
        _convolution(columns, given["conv1d_weight" + suffix])
        + _product(columns, given["x_proj_weight" + suffix], given["delta_proj_weight" + suffix])
        + _scan(1, columns, dim, dstate)
    )


def _mamba_inner(given):
    columns = given["xz"].shape[0] * given["xz"].shape[2]
    return _inner(columns, given) + _product(columns, given["out_proj_weight"])


def _mamba_inner_both(given):
    columns = given["xz"].shape[0] * given["xz"].shape[2]
    return _inner(columns, given) + _inner(columns, given, "_b") + _product(columns, given["out_proj_weight"])


def _mamba_step(given):
    rows = given["xz"].shape[0]
    products = _product(rows, given["x_proj_weight"], given["dt_proj_weight"])
    return _convolution(rows, given["conv1d_weight"]) + products + _scan(rows, 1, *given["A_log"].shape)


def _mamba2_step(given):
    rows, state = given["zxbcdt"].shape[0], given["ssm_state"]
    return _convolution(rows, given["conv1d_weight"]) + 4 * rows * math.prod(state.shape[1:])


def _split_conv1d_scan(given):
    batch, seqlen = given["zxbcdt"].shape[:2]
    weight, nheads, headdim, ngroups = given["conv1d_weight"], given["A"].numel(), given["headdim"], given["ngroups"]
    dstate = (weight.shape[0] - nheads * headdim) // (2 * ngroups)
    return _convolution(batch * seqlen, weight) + _ssd(batch, seqlen, nheads, headdim, ngroups, dstate)


def _element_by_element(given):
    return 0


# {operator: FLOPs of one call, from {argument's name: its value}}; NAME_backward takes twice NAME's.
FORMULAS = {
    "add_norm": _element_by_element,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_update": _causal_conv1d,
    "cross_entropy": _element_by_element,
    "dequantize": _element_by_element,
    "gated_norm": _element_by_element,
    "linear": _linear,
    "normed_linear": _linear,
    "mamba2_step": _mamba2_step,
    "mamba3_block": _mamba3_block,
    "mamba3_block_step": _mamba3_block_step,
    "mamba3_scan": _mamba3_scan,
    "mamba3_step": _mamba3_step,
    "mamba_inner": _mamba_inner,
    "mamba_inner_both": _mamba_inner_both,
    "mamba_step": _mamba_step,
    "selective_scan": _selective_scan,
    "selective_scan_double": _selective_scan_double,
    "selective_state_update": _selective_state_update,
    "selective_state_update_to": _selective_state_update,
    "split_conv1d_scan": _split_conv1d_scan,
    "ssd": _ssd_of,
    "ssd_varlen_states": _ssd_varlen_states,
    "swiglu": _element_by_element,
}
