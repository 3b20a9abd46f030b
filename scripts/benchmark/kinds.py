"""The kinds of cases that are operators, and the work that each cannot do without.

Letters: B batch, L length, D channels, N dstate, H heads, P headdim, R rank.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SSD_CHUNK = 64  # steps: what tensor cores take as one tile; a longer chunk does more work inside it

# How a pass is measured; any other one in the modes "gpu" and "call".
MODES = {"memory": ("memory",), "generate": ("tokens",), "generate, graph": ("tokens",)}


@dataclass(frozen=True)
class Work:
    """The least that a call must do: bytes moved, exponentials, floating-point operations on tensor cores."""

    bytes: float = 0.0
    exponentials: float = 0.0
    flops: float = 0.0


class Case:
    """What all cases share; each is a frozen dataclass of plain values, so that it can be sent to a process."""

    problem: ClassVar[str]  # the module of problems/ that makes it
    tokens: ClassVar[int | None] = None  # that a call of mode "tokens" makes
    tokens_of_step: ClassVar[int | None] = None  # that a call of mode "call" takes, where it is told
    beside: ClassVar[str] = "peer"  # the name of what it is compared with

    def other(self):
        """The case that is measured there: the same one, or where `beside` is no peer another one of ours."""
        return self

    def modes(self, which, device):
        modes = MODES.get(which, ("gpu", "call"))
        return modes if device == "cuda" else tuple(mode for mode in modes if mode in ("call", "tokens"))

    def measurements(self, device):
        """[(pass, mode)] of all that is measured."""
        return [(which, mode) for which in self.passes for mode in self.modes(which, device)]

    def work(self, which):
        """The Work of a pass, None where it says nothing."""
        return


@dataclass(frozen=True)
class Scan(Case):
    """Selective scan with D, delta_bias, softplus and variable B and C; z where it is gated."""

    problem: ClassVar[str] = "scan"
    batch: int
    seqlen: int
    dim: int
    dstate: int
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")
    groups: int = 1
    gated: bool = True

    @property
    def name(self):
        groups, without = f" G{self.groups}" if self.groups > 1 else "", "" if self.gated else " without z"
        return f"B{self.batch} L{self.seqlen} D{self.dim} N{self.dstate}{groups} {self.dtype}{without}"

    def work(self, which):
        if which not in ("fwd", "bwd"):
            return None
        steps = self.batch * self.seqlen
        # u, delta, z, out and B, C; backward reads u, delta, z, dout and B, C, and writes a gradient of each input
        wide, narrow = (3 + self.gated, 2) if which == "fwd" else (5 + 2 * self.gated, 4)
        moved = steps * (wide * self.dim + narrow * self.groups * self.dstate) * BYTES[self.dtype]
        return Work(bytes=moved, exponentials=steps * self.dim * self.dstate)


@dataclass(frozen=True)
class Ssd(Case):
    """Mamba-2's scan with D, dt_bias, softplus and one group of B and C."""

    problem: ClassVar[str] = "ssd"
    batch: int
    seqlen: int
    heads: int
    headdim: int
    dstate: int
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")

    @property
    def name(self):
        return f"B{self.batch} L{self.seqlen} H{self.heads} P{self.headdim} N{self.dstate} {self.dtype}"

    def work(self, which):
        steps = self.batch * self.seqlen
        width = self.heads * self.headdim
        # x, out, dt, B, C; backward reads x, dout, dt, B, C, and writes dx, ddt, dB, dC
        wide, narrow = (2, 1) if which == "fwd" else (3, 2)
        moved = steps * (wide * width + narrow * (self.heads + 2 * self.dstate)) * BYTES[self.dtype]
        return Work(bytes=moved, flops=steps * ssd_flops(width, self.dstate) * (1 if which == "fwd" else 3))


def ssd_flops(width, dstate):
    """A step of Mamba-2's scan: into the states, out of them, and what meets inside a chunk."""
    return width * (4 * dstate + 2 * SSD_CHUNK)


@dataclass(frozen=True)
class Conv(Case):
    """causal_conv1d_fn: width 4, bias, silu."""

    problem: ClassVar[str] = "conv"
    batch: int
    seqlen: int
    dim: int
    channel_last: bool = False
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")

    @property
    def name(self):
        last = "channel" if self.channel_last else "time"
        return f"B{self.batch} L{self.seqlen} D{self.dim} {last}-last {self.dtype}"

    def work(self, which):
        size = self.batch * self.seqlen * self.dim * BYTES[self.dtype]
        return Work(bytes=size * (2 if which == "fwd" else 3))


@dataclass(frozen=True)
class ConvUpdate(Case):
    """causal_conv1d_update: one step, width 4, a state of 4 steps, bias, silu."""

    problem: ClassVar[str] = "conv"
    batch: int
    dim: int
    dtype: str = "bfloat16"
    passes: tuple = ("step",)

    @property
    def name(self):
        return f"update B{self.batch} D{self.dim} {self.dtype}"

    def work(self, which):
        return Work(bytes=self.batch * self.dim * (2 * 4 + 2) * BYTES[self.dtype])  # the state twice, x, out


@dataclass(frozen=True)
class Norm(Case):
    """kind "add": the RMSNorm of x + residual (float32) and that sum; "gated": of x silu(z). float32 weight."""

    problem: ClassVar[str] = "norm"
    kind: str
    rows: int
    width: int
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")

    @property
    def name(self):
        return f"{self.kind} {self.rows} x {self.width} {self.dtype}"

    def work(self, which):
        narrow, wide = {  # tensors of dtype and of float32
            ("add", "fwd"): (2, 2),  # x, out; residual, sum
            ("add", "bwd"): (2, 3),  # dout, dx; dsum, sum, dresidual
            ("gated", "fwd"): (3, 0),  # x, z, out
            ("gated", "bwd"): (5, 0),  # dout, x, z, dx, dz
        }[self.kind, which]
        return Work(bytes=self.rows * self.width * (narrow * BYTES[self.dtype] + wide * 4))


@dataclass(frozen=True)
class Update(Case):
    """selective_state_update. heads 0: Mamba's state (B, D, N) with z and A of its own for each state, else Mamba-2's
    (B, H, P, N) with A, dt, D and dt_bias of one value a head, as stride-0 expansions."""

    problem: ClassVar[str] = "state_update"
    batch: int
    heads: int
    dim: int  # channels, of a head where there are heads
    dstate: int
    state_dtype: str
    passes: tuple = ("step",)
    dtype: str = "bfloat16"

    @property
    def name(self):
        channels = f"H{self.heads} P{self.dim}" if self.heads else f"D{self.dim}"
        return f"B{self.batch} {channels} N{self.dstate} {self.state_dtype} state"

    def work(self, which):
        states = self.batch * max(self.heads, 1) * self.dim * self.dstate
        return Work(bytes=2 * states * BYTES[self.state_dtype])


@dataclass(frozen=True)
class Mamba3Scan(Case):
    """Mamba-3's scan with D and the gate, a quarter as many angles as states: SISO, or MIMO with a rank above 1."""

    problem: ClassVar[str] = "mamba3_scan"
    batch: int
    seqlen: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    rank: int = 1
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")

    @property
    def angles(self):
        return self.dstate // 4

    @property
    def name(self):
        kind = f"MIMO R{self.rank}" if self.rank > 1 else "SISO"
        return f"{kind} B{self.batch} L{self.seqlen} H{self.heads} P{self.headdim} N{self.dstate} {self.dtype}"

    def work(self, which):
        steps, forward = self.batch * self.seqlen, which == "fwd"
        # V, Z, out; backward reads V, Z, dout and writes dV, dZ. Q, K, the angles and Trap, read, and their gradients.
        wide, narrow = (3, 1) if forward else (5, 2)
        small = 2 * self.rank * self.dstate + self.angles + self.heads
        moved = (wide * self.heads * self.headdim + narrow * small) * BYTES[self.dtype]
        moved += narrow * 2 * self.heads * 4  # ADT and DT are float32
        flops = mamba3_flops(self.heads, self.headdim, self.dstate, self.rank)
        return Work(bytes=steps * moved, flops=steps * flops * (1 if forward else 3))


def mamba3_flops(heads, headdim, dstate, rank=1):
    """A step of Mamba-3's scan: each of its rows into the states, out of them, and what meets inside a chunk, where the
    heads turn Q and K differently. A chunk has as many rows as Mamba-2's.
    """
    return heads * rank * (4 * headdim * dstate + 2 * SSD_CHUNK * (headdim + dstate))


@dataclass(frozen=True)
class Mamba3Step(Case):
    """A decoding step of Mamba-3's scan with D and the gate, SISO."""

    problem: ClassVar[str] = "mamba3_step"
    batch: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    state_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    passes: tuple = ("step",)

    @property
    def name(self):
        return f"step B{self.batch} H{self.heads} P{self.headdim} N{self.dstate} {self.state_dtype} state"

    def work(self, which):
        states = self.batch * self.heads * self.headdim * self.dstate
        return Work(bytes=2 * states * BYTES[self.state_dtype])


@dataclass(frozen=True)
class CrossScan(Case):
    """cross_selective_scan of images, beside one selective scan over four materialised copies of them."""

    problem: ClassVar[str] = "cross_scan"
    beside: ClassVar[str] = "four copies"
    batch: int
    dim: int
    height: int
    width: int
    dstate: int = 16
    rank: int = 6
    dtype: str = "bfloat16"
    copies: bool = False
    passes: tuple = ("fwd", "fwd+bwd")

    @property
    def name(self):
        return f"B{self.batch} D{self.dim} {self.height} x {self.width} N{self.dstate} {self.dtype}"

    def other(self):
        return replace(self, copies=True)

    def work(self, which):
        pixels, passes = self.batch * self.height * self.width, 1 if which == "fwd" else 2
        moved = pixels * self.dim * BYTES[self.dtype] * (2 if which == "fwd" else 4)  # x, out; x, dout, dx
        return Work(bytes=moved, exponentials=4 * pixels * self.dim * self.dstate * passes)
