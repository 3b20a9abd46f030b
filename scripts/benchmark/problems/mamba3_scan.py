"""Mamba-3's scan: mamba3_scan, or upstream's functions for SISO and MIMO."""

import math
from functools import partial

import references
import torch
from side import Lacking

from problems.common import check_with_gradients, differentiable_calls, dtype_of, input_sets, normals

WITH_BATCH = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")
OURS = "mamba_ssm.ops.mamba3_scan:mamba3_scan"
UPSTREAM = {
    "SISO": "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined:mamba3_siso_combined",
    "MIMO": "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo:mamba3_mimo",
}


def inputs(case, device, seed=0, length=()):
    """Tensors of mamba3_scan by name, as a layer would see them; length () is that of a step."""
    normal, dtype = normals(device, seed), dtype_of(case)
    steps, heads = (case.batch, *length), (case.heads, case.headdim)
    rank = getattr(case, "rank", 1)
    matrices = (*steps, rank, 1, case.dstate)
    DT = torch.nn.functional.softplus(normal(*steps, case.heads, scale=0.5) - 4.0)
    rate = 1 + torch.nn.functional.softplus(normal(*steps, case.heads))
    tensors = {
        "Q": normal(*matrices, dtype=dtype),
        "K": normal(*matrices, dtype=dtype),
        "V": normal(*steps, *heads, dtype=dtype),
        "ADT": -rate * DT,
        "DT": DT,
        "Trap": normal(*steps, case.heads, dtype=dtype),
        "Q_bias": 1 + normal(case.heads, rank, case.dstate, scale=0.1),
        "K_bias": 1 + normal(case.heads, rank, case.dstate, scale=0.1),
        "Angles": normal(*steps, case.dstate // 4, dtype=dtype),
        "D": normal(case.heads),
        "Z": normal(*steps, *heads, dtype=dtype),
    }
    if rank > 1:
        for name in ("MIMO_V", "MIMO_Z", "MIMO_Out"):
            tensors[name] = (1 + normal(case.heads, rank, case.headdim, scale=0.1)) / (1 if name == "MIMO_Z" else rank)
    return tensors


def _rows_of_one(function, **tensors):
    """Without MIMO_Out a result has the rank as a dimension."""
    return function(**tensors).squeeze(-3)


def _upstreams(function, mimo, Q, K, ADT, DT, Trap, Q_bias, K_bias, Angles, **others):
    """A call in upstream's layouts, as its layer makes it."""
    ADT, DT, Trap = (tensor.transpose(1, 2) for tensor in (ADT, DT, Trap))
    Angles = Angles[:, :, None].expand(-1, -1, DT.shape[1], -1).float()
    if mimo:
        sizes = {"chunk_size": 64 // Q.shape[2], "rotary_dim_divisor": Q.shape[-1] / 2 / Angles.shape[-1]}
        others |= sizes | {"dtype": others["V"].dtype}
    else:
        Q, K, Q_bias, K_bias = Q.squeeze(2), K.squeeze(2), Q_bias.squeeze(1), K_bias.squeeze(1)
    return function(Q=Q, K=K, ADT=ADT, DT=DT, Trap=Trap, Q_bias=Q_bias, K_bias=K_bias, Angles=Angles, **others)


def call(function, case):
    """mamba3_scan for a case: its result has the dimensions of V."""
    return partial(function, pairwise=False) if case.rank > 1 else partial(_rows_of_one, function)


def validate(side, function, case, tensors):
    # Tensor cores take turned and decayed products rounded to the dtype: its limit holds for float32 gradients too.
    # An output's error grows with its gate, that of dZ as much with the gradient that comes in: of 7e7 elements the
    # largest is off by 0.03 to 0.04 in both. An angle turns all that follows, and what it does to the same turn of q
    # and of k cancels, but not the rounding of their products, which adds up as a random walk: plain torch with
    # operands rounded to bfloat16 is off by 0.009 at 256 steps and 0.022 at 2048 (MIMO 0.011 and 0.029).
    angles = max(1.0, math.sqrt(case.seqlen / 32))
    factors = {} if case.dtype == "float32" else {"output 0": 1.5, "dZ": 1.5, "dAngles": angles}
    check_with_gradients(
        side, function, references.mamba3_scan, tensors, WITH_BATCH, 1, dtype_of(case), factors=factors
    )


def prepare(case, device, side):
    mimo = case.rank > 1
    try:
        function = call(side.function(OURS), case)
    except Lacking:
        function = partial(_upstreams, side.function(UPSTREAM["MIMO" if mimo else "SISO"]), mimo)
    sets = input_sets(partial(inputs, case, device, length=(case.seqlen,)), device)
    validate(side, function, case, sets[0])
    return differentiable_calls(function, sets, case.passes)
