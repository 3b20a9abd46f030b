"""The kinds of cases that are layers and models, and the work that each cannot do without.

Letters: B batch, L length, P headdim, N dstate, d d_model.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from kinds import BYTES, Case, Work, mamba3_flops, ssd_flops


@dataclass(frozen=True)
class Block(Case):
    """A layer of problems/block.py: parameters and input of dtype (D and Mamba's A_log stay float32), no autocast."""

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


@dataclass(frozen=True)
class Bidirectional(Block):
    """A layer that sees its input from both ends, beside the one of ours that sees it from one."""

    beside: ClassVar[str] = "one way"
    passes: tuple = ("fwd", "fwd+bwd")

    def other(self):
        one_way = {"Mamba v2": "Mamba", "BiMamba2": "Mamba2", "Hydra": "Mamba2"}
        return replace(self, layer=one_way[self.layer])


def layer_work(layer, d_model, d_state=0):
    """(floating-point operations, exponentials) of one step of a layer with expand 2 and headdim 64."""
    inner = 2 * d_model
    if layer in ("Mamba", "Mamba1", "Mamba v2"):
        dstate, dt_rank = d_state or 16, -(-d_model // 16)
        ways = 2 if layer == "Mamba v2" else 1
        weights = 3 * inner * d_model + ways * inner * 2 * (dt_rank + dstate)
        return 2 * weights, ways * inner * dstate
    dstate, heads = d_state or 128, inner // 64
    if layer in ("Mamba3", "Mamba3 MIMO"):
        rank = 4 if layer == "Mamba3 MIMO" else 1
        weights = d_model * (3 * inner + 2 * rank * dstate + 3 * heads + dstate // 4)
        return 2 * weights + mamba3_flops(heads, 64, dstate, rank), 0
    ways = 1 if layer == "Mamba2" else 2
    matrices = (4 if layer == "Hydra" else 2) * dstate
    return 2 * d_model * (3 * inner + matrices) + ways * ssd_flops(inner, dstate), 0


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
    """A training step of a language model: float32 parameters, bfloat16 autocast, cross entropy, AdamW.

    mode: eager; compiled, reduce-overhead: the loss by torch.compile, in its default mode or in this one, which replays
    CUDA graphs; captured: forward, backward and optimizer as one CUDA graph.
    """

    problem: ClassVar[str] = "train"
    layer: str
    batch: int
    seqlen: int
    d_model: int = 768
    n_layer: int = 24
    mode: str = "eager"
    passes: tuple = ("memory", "step")

    @property
    def name(self):
        return f"{self.layer} {self.n_layer} layers d{self.d_model} B{self.batch} L{self.seqlen} {self.mode}"

    @property
    def tokens_of_step(self):
        return self.batch * self.seqlen

    def modes(self, which, device):
        """A step has more kernels than the GPU's queue holds: that it was kept full could not be said.

        The profiler, which other machines may lack, comes last.
        """
        modes = ("call", "busy") if which == "step" else super().modes(which, device)
        return modes if device == "cuda" else tuple(mode for mode in modes if mode == "call")

    def work(self, which):
        per_step, exponentials = layer_work(self.layer, self.d_model)
        steps = self.batch * self.seqlen
        head = 2 * self.d_model * 50280
        flops = 3 * steps * (self.n_layer * per_step + head)
        return Work(flops=flops, exponentials=2 * steps * self.n_layer * exponentials)
