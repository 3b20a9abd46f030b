"""What is measured, its inputs, and the figures of upstream that the results are held against."""

from dataclasses import dataclass

import torch

# upstream mamba-ssm (main of 2026-07 with its CUDA scan), one H200, torch 2.11, CUDA 13.0, medians of 20, milliseconds.
UPSTREAM_SOURCE = "upstream mamba-ssm, H200, torch 2.11, CUDA 13.0 (copy bandwidth there 4213 GB/s)"


@dataclass(frozen=True)
class Scan:
    """Selective scan with z, D, delta_bias, softplus and one group of variable B and C."""

    batch: int
    seqlen: int
    dim: int
    dstate: int
    dtype: torch.dtype
    upstream_forward: float
    upstream_backward: float
    goal: float  # speed over upstream that the project asks for

    @property
    def name(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch} L{self.seqlen} D{self.dim} N{self.dstate} {dtype}"


SCANS = [
    Scan(8, 2048, 1536, 16, torch.bfloat16, 0.482, 1.981, 2.0),
    Scan(8, 2048, 4096, 16, torch.bfloat16, 1.213, 4.881, 2.0),
    Scan(1, 16384, 4096, 16, torch.bfloat16, 1.565, 5.540, 1.5),
    Scan(1, 131072, 1536, 16, torch.bfloat16, 4.487, 15.793, 1.5),
    Scan(64, 512, 1536, 16, torch.bfloat16, 0.821, 3.312, 2.0),
    Scan(8, 2048, 4096, 64, torch.bfloat16, 3.928, 17.866, 2.0),
    Scan(1, 2048, 1536, 16, torch.bfloat16, 0.074, 0.374, 1.5),
    Scan(8, 2048, 1536, 16, torch.float32, 0.894, 2.354, 2.0),
    Scan(8, 2048, 4096, 16, torch.float32, 2.314, 5.510, 2.0),
    Scan(1, 16384, 4096, 16, torch.float32, 2.754, 6.027, 1.5),
    Scan(1, 131072, 1536, 16, torch.float32, 7.755, 17.845, 1.5),
]


@dataclass(frozen=True)
class Ssd:
    """Mamba-2's scan with D, dt_bias, softplus and one group of B and C."""

    batch: int
    seqlen: int
    heads: int
    headdim: int
    dstate: int
    dtype: torch.dtype
    upstream_forward: float = float("nan")
    upstream_backward: float = float("nan")
    goal: float = 1.3

    @property
    def name(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch} L{self.seqlen} H{self.heads} P{self.headdim} N{self.dstate} {dtype}"


SSDS = [
    Ssd(8, 2048, 24, 64, 128, torch.bfloat16, 0.953, 2.460),
    Ssd(8, 2048, 64, 64, 128, torch.bfloat16, 1.083, 2.851),
    Ssd(1, 16384, 64, 64, 128, torch.bfloat16, 0.821, 2.557),
]
CPU_SSDS = [
    Ssd(1, 2048, 24, 64, 128, torch.float32),
    Ssd(1, 2048, 24, 64, 128, torch.bfloat16),
    Ssd(1, 2048, 24, 64, 16, torch.float32),
]


@dataclass(frozen=True)
class Block:
    """Mamba or Mamba2 (d_model), parameters and input in bfloat16 (D and Mamba's A_log stay float32), no autocast."""

    batch: int
    seqlen: int
    d_model: int
    upstream_forward: float
    upstream_both: float
    goal: float = 1.3

    @property
    def name(self):
        return f"B{self.batch} L{self.seqlen} d{self.d_model}"


BLOCKS = [
    Block(8, 2048, 768, 1.003, 3.562),
    Block(8, 2048, 2048, 2.477, 9.793),
    Block(1, 512, 768, 0.550, 2.113),
    Block(1, 16384, 2048, 2.815, 10.528),
]

MAMBA2_BLOCKS = [
    Block(8, 2048, 768, 1.106, 5.344),
    Block(8, 2048, 2048, 2.150, 7.299),
    Block(1, 512, 768, 1.500, 4.981, 4.0),
    Block(1, 16384, 2048, 1.937, 7.429),
]
MAMBA2_CPU_BLOCK = Block(1, 1024, 512, float("nan"), float("nan"))

# (batch, seqlen, dim, channel_last, upstream forward ms or None); width 4, bias, silu, bfloat16
CONVS = [
    (8, 2048, 4096, False, 0.126),
    (1, 16384, 4096, False, 0.130),
    (8, 2048, 4096, True, None),
    (1, 16384, 4096, True, None),
]
CONV_GOAL_OF_COPY = 0.7

# (rows, width); bfloat16, float32 weight. A language model's RMSNorm has a float32 residual, a Mamba-2 layer's a gate.
NORMS = [(16384, 1536), (16384, 4096), (16384, 8192)]
NORM_GOAL_OF_COPY = 0.8

# (batch, dim, dstate, upstream us a call from Python); float32 state, bfloat16 inputs
DECODES = [(1, 4096, 16, 108.0), (128, 4096, 16, 184.0)]
DECODE_CALL_GOAL_US = 25.0
DECODE_KERNEL_GOAL_US = 6.0

SMALL_SCAN = Scan(1, 16, 16, 16, torch.float32, float("nan"), float("nan"), 1.0)
SMALL_FORWARD_GOAL_US = 20.0
SMALL_BOTH_GOAL_US = 120.0

CPU_SCAN = Scan(1, 2048, 1536, 16, torch.float32, float("nan"), float("nan"), 1.0)
CPU_THREADS = 2


def ssd_inputs(case, device, seed=0):
    """Tensors of mamba_chunk_scan_combined by name, as a trained layer would see them."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, dtype=case.dtype, scale=1.0):
        return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

    steps = (case.batch, case.seqlen)
    return {
        "x": normal(*steps, case.heads, case.headdim),
        "dt": normal(*steps, case.heads, scale=0.5),
        "A": -torch.linspace(1, 16, case.heads, device=device),
        "B": normal(*steps, 1, case.dstate),
        "C": normal(*steps, 1, case.dstate),
        "D": normal(case.heads, dtype=torch.float32),
        "dt_bias": normal(case.heads, dtype=torch.float32, scale=0.5) - 4.0,
    }


def scan_inputs(case, device, seed=0):
    """Keyword arguments of selective_scan_fn but for delta_softplus, as a trained layer would see them."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, dtype=case.dtype, scale=1.0):
        return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

    batch, dim, seqlen, dstate = case.batch, case.dim, case.seqlen, case.dstate
    rows = torch.arange(1, dstate + 1, device=device, dtype=torch.float32).repeat(dim, 1)
    return {
        "u": normal(batch, dim, seqlen),
        "delta": normal(batch, dim, seqlen, scale=0.5),
        "A": -rows,
        "B": normal(batch, dstate, seqlen),
        "C": normal(batch, dstate, seqlen),
        "D": normal(dim, dtype=torch.float32),
        "z": normal(batch, dim, seqlen),
        "delta_bias": normal(dim, dtype=torch.float32, scale=0.5) - 4.0,
    }


@dataclass(frozen=True)
class LanguageModel:
    """Greedy decoding with random weights; 24 layers of width 768 are upstream's 130M size."""

    layer: str
    dtype: torch.dtype
    batch: int
    new: int  # tokens timed
    d_model: int = 768
    n_layer: int = 24

    @property
    def name(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layer} d{self.d_model} {self.n_layer} layers B{self.batch} {dtype}"


LMS = {
    "cuda": [
        LanguageModel("Mamba2", torch.bfloat16, 1, 256),
        LanguageModel("Mamba1", torch.bfloat16, 1, 256),
        LanguageModel("Mamba2", torch.bfloat16, 64, 256),
    ],
    "cpu": [
        LanguageModel("Mamba2", torch.float32, 1, 16),
        LanguageModel("Mamba1", torch.float32, 1, 16),
    ],
}
LM_PROMPT = 100
LM_VALIDATED = 20
LM_REPEATS = 5

# transformers' models, small enough that their own path takes seconds
TRANSFORMERS_MODELS = {
    "mamba": {"hidden_size": 256, "num_hidden_layers": 4, "state_size": 16},
    "mamba2": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "state_size": 64,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 128,
    },
}
TRANSFORMERS_BATCH, TRANSFORMERS_SEQLEN = 1, 256
TRANSFORMERS_PROMPT, TRANSFORMERS_NEW = 128, 32
TRANSFORMERS_REPEATS = 5
