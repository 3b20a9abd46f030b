"""The kinds of cases, and the work that each cannot do without.

Letters: B batch, L length, D channels, N dstate, H heads, P headdim, W conv width, d d_model.
"""

from dataclasses import dataclass
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
    """Selective scan with z, D, delta_bias, softplus and one group of variable B and C."""

    problem: ClassVar[str] = "scan"
    batch: int
    seqlen: int
    dim: int
    dstate: int
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "bwd")

    @property
    def name(self):
        return f"B{self.batch} L{self.seqlen} D{self.dim} N{self.dstate} {self.dtype}"

    def work(self, which):
        if which not in ("fwd", "bwd"):
            return None
        steps = self.batch * self.seqlen
        # u, delta, z, out and B, C; backward reads u, delta, z, dout and B, C, and writes a gradient of each input
        wide, narrow = (4, 2) if which == "fwd" else (7, 4)
        moved = steps * (wide * self.dim + narrow * self.dstate) * BYTES[self.dtype]
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
class Block(Case):
    """A Mamba or Mamba2 layer: parameters and input of dtype (D and Mamba's A_log stay float32), no autocast."""

    problem: ClassVar[str] = "block"
    layer: str
    batch: int
    seqlen: int
    d_model: int
    headdim: int = 64
    d_state: int = 0  # 0: the layer's own, 16 or 128
    dtype: str = "bfloat16"
    passes: tuple = ("fwd", "fwd+bwd", "memory")

    @property
    def name(self):
        sizes = f" P{self.headdim} N{self.d_state}" if self.d_state else ""
        return f"{self.layer} B{self.batch} L{self.seqlen} d{self.d_model}{sizes} {self.dtype}"

    def work(self, which):
        steps = self.batch * self.seqlen
        per_step, exponentials = layer_work(self.layer, self.d_model, self.d_state)
        both = which == "fwd+bwd"
        return Work(flops=steps * per_step * (3 if both else 1), exponentials=steps * exponentials * (2 if both else 1))


def layer_work(layer, d_model, d_state=0):
    """(floating-point operations, exponentials) of one step of a layer with expand 2."""
    inner = 2 * d_model
    if layer in ("Mamba", "Mamba1"):
        dstate, dt_rank = d_state or 16, -(-d_model // 16)
        weights = d_model * 2 * inner + inner * (dt_rank + 2 * dstate) + dt_rank * inner + inner * d_model
        return 2 * weights, inner * dstate
    dstate = d_state or 128
    weights = d_model * (2 * inner + 2 * dstate) + inner * d_model
    return 2 * weights + ssd_flops(inner, dstate), 0


@dataclass(frozen=True)
class Decode(Case):
    """Steps of a language model with random weights; 24 layers of width 768 are upstream's 130M size.

    step: one call of the model; generate: greedy decoding of new tokens, prompt included; graph: as a CUDA graph.
    """

    problem: ClassVar[str] = "decode"
    layer: str
    batch: int
    dtype: str = "bfloat16"
    d_model: int = 768
    n_layer: int = 24
    prompt: int = 16
    new: int = 64
    passes: tuple = ("step", "step, graph", "generate", "generate, graph")

    @property
    def name(self):
        return f"{self.layer} {self.n_layer} layers d{self.d_model} B{self.batch} {self.dtype}"

    @property
    def tokens(self):
        return self.batch * self.new

    def work(self, which):
        weights = lm_weights(self.layer, self.d_model, self.n_layer)
        dstate = 16 if self.layer == "Mamba1" else 128
        states = self.batch * self.n_layer * 2 * self.d_model * dstate
        return Work(bytes=(weights + 2 * states) * BYTES[self.dtype])


def lm_weights(layer, d_model, n_layer, vocabulary=50280):
    """Parameters of a language model whose head is its embedding, to within its biases and norms."""
    inner = 2 * d_model
    if layer == "Mamba1":
        rank = -(-d_model // 16)
        return n_layer * (3 * inner * d_model + inner * (2 * rank + 2 * 16)) + vocabulary * d_model
    return n_layer * (3 * inner * d_model + 2 * 128 * d_model) + vocabulary * d_model


@dataclass(frozen=True)
class Train(Case):
    """A training step of a language model: float32 parameters, bfloat16 autocast, cross entropy, AdamW."""

    problem: ClassVar[str] = "train"
    layer: str
    batch: int
    seqlen: int
    d_model: int = 768
    n_layer: int = 24
    passes: tuple = ("step", "memory")

    @property
    def name(self):
        return f"{self.layer} {self.n_layer} layers d{self.d_model} B{self.batch} L{self.seqlen}"

    def modes(self, which, device):
        """A step has more kernels than the GPU's queue holds: that it was kept full could not be said."""
        return tuple(mode for mode in super().modes(which, device) if mode != "gpu")

    def work(self, which):
        per_step, exponentials = layer_work(self.layer, self.d_model)
        steps = self.batch * self.seqlen
        head = 2 * self.d_model * 50280
        flops = 3 * steps * (self.n_layer * per_step + head)
        return Work(flops=flops, exponentials=2 * steps * self.n_layer * exponentials)
