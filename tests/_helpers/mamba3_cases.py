"""Problems of Mamba-3's scan that the tests share.

Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles, U sequences.
"""

from dataclasses import dataclass

import torch

STATES = ("angle_state", "ssm_state", "k_state", "v_state")


@dataclass(frozen=True)
class Mamba3Case:
    """One scan of Mamba-3; inputs() makes its tensors, run() calls a function with them."""

    batch: int
    seqlen: int
    heads: int
    headdim: int
    dstate: int = 16
    groups: int = 1
    rank: int = 0  # 0: SISO, else MIMO of this rank, with its projections
    nangles: int = 4
    D: bool = True
    Z: bool = True
    norm: bool = False
    reduced: bool = True  # with MIMO_Out
    angles_of_heads: bool = False
    states: bool = False
    seq_idx: bool = False
    cu_seqlens: tuple = ()

    def inputs(self, dtype, device, seed=0):
        """Tensors by the names of mamba3_scan's arguments, but the initial states by those of STATES."""
        generator = torch.Generator().manual_seed(seed)
        batch, seqlen, heads, headdim, dstate = self.batch, self.seqlen, self.heads, self.headdim, self.dstate
        rank, rows = max(self.rank, 1), len(self.cu_seqlens) - 1 if self.cu_seqlens else batch
        f32 = torch.float32

        def normal(*shape, dtype=dtype, mean=0.0, scale=1.0):
            return (mean + scale * torch.randn(*shape, generator=generator)).to(dtype)

        def parameter(*shape, given=True):
            return normal(*shape, dtype=f32, mean=0.5, scale=0.5) if given else None

        steps, projection = (batch, seqlen, heads), (heads, rank, headdim)
        dt = 0.5 * torch.rand(steps, generator=generator)
        tensors = {
            "Q": normal(batch, seqlen, rank, self.groups, dstate),
            "K": normal(batch, seqlen, rank, self.groups, dstate),
            "V": normal(*steps, headdim),
            "ADT": -dt * torch.rand(steps, generator=generator),
            "DT": dt,
            "Trap": normal(*steps),
            "Q_bias": parameter(heads, rank, dstate),
            "K_bias": parameter(heads, rank, dstate),
            "Angles": normal(*(steps if self.angles_of_heads else (batch, seqlen)), self.nangles),
            "D": parameter(heads, given=self.D),
            "Z": normal(*steps, headdim) if self.Z else None,
            "MIMO_V": parameter(*projection, given=self.rank > 0),
            "MIMO_Z": parameter(*projection, given=self.rank > 0 and self.Z),
            "MIMO_Out": parameter(*projection, given=self.rank > 0 and self.reduced),
            "norm_weight": parameter(heads, headdim, given=self.norm),
        }
        if self.states:
            tensors["angle_state"] = 6 * torch.rand(rows, heads, self.nangles, generator=generator)
            tensors["ssm_state"] = normal(rows, heads, headdim, dstate, dtype=f32)
            tensors["k_state"] = normal(rows, rank, heads, dstate, dtype=f32)
            tensors["v_state"] = normal(rows, heads, headdim, dtype=f32)
        if self.seq_idx:
            tensors["seq_idx"] = (torch.rand(batch, seqlen, generator=generator) < 0.1).cumsum(1).to(torch.int32)
        if self.cu_seqlens:
            tensors["cu_seqlens"] = torch.tensor(self.cu_seqlens, dtype=torch.int32)
        return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}

    def run(self, function, **options):
        """function's output and the four final states, as a function of inputs() by name."""

        def call(**tensors):
            states = tuple(tensors.pop(name, None) for name in STATES)
            states = None if states[0] is None else states
            pairwise = self.rank == 0
            out, finals = function(
                **tensors, initial_states=states, pairwise=pairwise, return_final_states=True, **options
            )
            return (out, *finals)

        return call


# Lengths around the chunks (64 steps, with a rank 64 / R), what may be left out, odd sizes, all kinds of packing.
MAMBA3_CASES = (
    Mamba3Case(2, 70, 4, 8),
    Mamba3Case(1, 1, 1, 1, dstate=1, nangles=0),
    Mamba3Case(3, 0, 2, 5, states=True),
    Mamba3Case(2, 1, 2, 5, states=True),
    Mamba3Case(2, 63, 6, 20, dstate=24, groups=3, nangles=12, angles_of_heads=True),
    Mamba3Case(1, 64, 18, 48, dstate=96, groups=3, nangles=24, states=True),
    Mamba3Case(2, 65, 3, 7, dstate=9, D=False, Z=False, nangles=3, states=True),
    Mamba3Case(1, 200, 2, 33, dstate=37, norm=True, nangles=18, angles_of_heads=True, states=True),
    Mamba3Case(1, 130, 4, 64, dstate=128, nangles=32, Z=False),
    Mamba3Case(2, 150, 4, 8, groups=2, seq_idx=True, states=True),
    Mamba3Case(1, 150, 4, 8, cu_seqlens=(0, 64, 64, 65, 67, 150), states=True, norm=True),
    Mamba3Case(1, 7, 2, 8, cu_seqlens=(0, 0, 5, 5), states=True),
    Mamba3Case(2, 70, 4, 8, rank=1, nangles=8),
    Mamba3Case(2, 33, 4, 8, rank=4, states=True, groups=2),
    Mamba3Case(1, 17, 6, 20, rank=3, dstate=25, nangles=12, groups=3, norm=True, states=True),
    Mamba3Case(1, 40, 2, 16, rank=2, reduced=False, norm=True, angles_of_heads=True),
    Mamba3Case(2, 40, 2, 16, rank=8, reduced=False, Z=False, D=False),
    Mamba3Case(1, 5, 1, 3, rank=64, dstate=4, nangles=1, states=True),
    Mamba3Case(1, 50, 2, 8, rank=4, cu_seqlens=(0, 1, 16, 16, 33, 50), states=True),
    Mamba3Case(2, 50, 2, 8, rank=2, seq_idx=True, states=True, Z=False),
    Mamba3Case(1, 130, 3, 70, dstate=40, nangles=10, states=True, norm=True),
    Mamba3Case(1, 70, 2, 100, dstate=200, nangles=50, states=True),
    Mamba3Case(1, 40, 2, 40, rank=4, dstate=136, nangles=68, states=True, norm=True),
    # 65 to 128 states and ranks 1, 2 and 4 have kernels of Hopper's own: several heads and tiles of headdim in a walk.
    # With seq_idx, or where rows do not lie at multiples of 16 bytes, these sizes have the others.
    Mamba3Case(1, 100, 4, 72, dstate=128, nangles=64, groups=2, states=True),
    Mamba3Case(1, 150, 3, 64, dstate=100, nangles=40, cu_seqlens=(0, 64, 64, 65, 67, 150), states=True),
    Mamba3Case(1, 70, 2, 128, dstate=128, nangles=64),
    Mamba3Case(1, 70, 2, 64, dstate=128, nangles=32, norm=True),
    Mamba3Case(1, 40, 3, 64, rank=4, dstate=128, nangles=32, states=True, norm=True),
    Mamba3Case(1, 70, 4, 72, rank=4, dstate=128, nangles=32, groups=2, states=True),
    Mamba3Case(1, 50, 2, 64, rank=4, dstate=100, nangles=41, cu_seqlens=(0, 1, 16, 16, 33, 50), states=True),
    Mamba3Case(1, 50, 2, 24, rank=2, dstate=80, nangles=33, states=True),
    Mamba3Case(1, 70, 2, 40, rank=1, dstate=96, nangles=0),
    Mamba3Case(1, 100, 4, 70, dstate=128, nangles=64, groups=2),
    Mamba3Case(1, 50, 2, 24, rank=2, dstate=80, nangles=33, seq_idx=True, states=True),
    Mamba3Case(1, 150, 2, 64, dstate=124, nangles=62, states=True),
    # Four ranks of 128 states and up to 32 angles have one of their own forward and in two passes of backward.
    Mamba3Case(1, 150, 2, 40, rank=4, dstate=128, nangles=20, D=False, cu_seqlens=(0, 16, 16, 17, 150), states=True),
    Mamba3Case(2, 16, 2, 64, rank=4, dstate=128, nangles=32),
    Mamba3Case(1, 70, 2, 64, rank=4, dstate=128, nangles=64, states=True),
    Mamba3Case(1, 50, 2, 40, rank=4, dstate=96, nangles=24, states=True),
)
