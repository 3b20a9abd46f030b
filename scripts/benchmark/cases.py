"""What is measured, as data: each section's cases by device."""

from kinds import Conv, ConvUpdate, CrossScan, Mamba3Scan, Mamba3Step, Norm, Scan, Ssd, Update
from layer_kinds import Bidirectional, Block, Decode, Train

CPU_THREADS = 2
SMALL = ("no grad", "fwd+bwd")
MAMBA_BLOCKS = [(8, 2048, 768), (8, 2048, 2048), (1, 16384, 2048), (16, 1024, 512), (1, 512, 768), (1, 513, 768)]
MAMBA2_BLOCKS = MAMBA_BLOCKS[:-1]
LAYERS = ("Mamba2", "Mamba1", "Mamba3")
MODES = ("eager", "compiled", "reduce-overhead", "captured")  # of training steps

CASES = {
    "cuda": {
        "scan": [
            Scan(8, 2048, 1536, 16),
            Scan(8, 2048, 4096, 16),
            Scan(1, 16384, 4096, 16),
            Scan(1, 131072, 1536, 16),
            Scan(64, 512, 1536, 16),
            Scan(8, 2048, 4096, 64),
            Scan(1, 1024, 8192, 128),
            Scan(1, 4096, 5120, 16),
            Scan(1, 2048, 1536, 16),
            Scan(2, 1000, 768, 8),
            Scan(16, 196, 384, 16),
            Scan(8, 2049, 1536, 16),
            Scan(8, 2048, 4096, 16, "float32"),
            Scan(1, 131072, 1536, 16, "float32"),
            Scan(1, 2048, 1536, 16, "float32"),
            Scan(16, 3136, 768, 1, "float32", groups=4, gated=False),  # VMamba: one state a channel, no z
            Scan(64, 196, 3072, 1, groups=4, gated=False),
            Scan(16, 3136, 768, 2, "float32", groups=4, gated=False),  # two and four states: its descendants
            Scan(64, 196, 3072, 4, groups=4, gated=False),
            Scan(8, 2048, 4096, 4, gated=False),
            Scan(1, 16, 16, 16, "float32", passes=SMALL),
        ],
        "ssd": [
            Ssd(8, 2048, 24, 64, 128),
            Ssd(8, 2048, 64, 64, 128),
            Ssd(1, 16384, 64, 64, 128),
            Ssd(2, 4096, 80, 64, 128),
            Ssd(4, 2048, 32, 128, 256),
            Ssd(1, 4096, 24, 128, 256),  # Falcon-H1's
        ],
        "block": [Block("Mamba", *sizes) for sizes in MAMBA_BLOCKS],
        "mamba2": [
            *(Block("Mamba2", *sizes) for sizes in MAMBA2_BLOCKS),
            Block("Mamba2", 4, 2048, 2048, headdim=128, d_state=256),
        ],
        "mamba3": [
            *(Mamba3Scan(8, 2048, heads, rank=rank) for heads in (64, 24) for rank in (1, 4)),
            *(Mamba3Step(batch, 64, state_dtype=dtype) for batch in (1, 64, 128) for dtype in ("bfloat16", "float32")),
            *(Block(layer, 8, 2048, width) for layer in ("Mamba3", "Mamba3 MIMO") for width in (2048, 768)),
        ],
        "bidirectional": [
            Bidirectional("Mamba v2", 8, 2048, 768),
            Bidirectional("BiMamba2", 8, 2048, 768, d_state=128),
            Bidirectional("Hydra", 8, 2048, 768, d_state=64),
        ],
        "cross": [CrossScan(32, 192, 56, 56), CrossScan(32, 768, 14, 14, rank=24)],
        "update": [
            Update(1, 0, 4096, 16, "float32"),
            Update(128, 0, 4096, 16, "float32"),
            Update(64, 0, 4096, 128, "float32"),
            Update(64, 24, 64, 128, "bfloat16"),
            Update(256, 80, 64, 128, "bfloat16"),
            Update(64, 80, 64, 128, "float32"),
        ],
        "conv": [
            Conv(8, 2048, 4096),
            Conv(1, 16384, 4096),
            Conv(8, 2048, 4096, channel_last=True),
            Conv(1, 16384, 4096, channel_last=True),
            ConvUpdate(1, 1792),
            ConvUpdate(64, 1792),
            ConvUpdate(256, 5376),
        ],
        "norm": [Norm(kind, 16384, width) for kind in ("add", "gated") for width in (1536, 4096, 8192)],
        "decode": [Decode(layer, batch) for layer in ("Mamba2", "Mamba1") for batch in (1, 64, 256)],
        # eager first; of compiling 48 layers one line: a section of minutes would be one of twice as many
        "train": [
            *(Train(layer, 4, 2048, mode=mode) for mode in MODES for layer in LAYERS),
            *(Train(layer, 4, 2048, 1024, 48, mode) for mode in ("eager", "captured") for layer in LAYERS),
            Train("Mamba2", 4, 2048, 1024, 48, "compiled"),
        ],
    },
    "cpu": {
        "scan": [Scan(1, 1024, 256, 16, "float32"), Scan(1, 16, 16, 16, "float32", passes=SMALL)],
        "ssd": [Ssd(1, 1024, 8, 64, 128, "float32"), Ssd(1, 1024, 8, 64, 128)],
        "block": [Block("Mamba", 1, 512, 256, dtype="float32", passes=("fwd", "fwd+bwd"))],
        "mamba2": [Block("Mamba2", 1, 512, 256, dtype="float32", passes=("fwd", "fwd+bwd"))],
        "mamba3": [
            Mamba3Scan(1, 1024, 8, dtype="float32"),
            Mamba3Step(1, 24, state_dtype="float32", dtype="float32"),
            Block("Mamba3", 1, 512, 256, dtype="float32", passes=("fwd", "fwd+bwd")),
        ],
        "bidirectional": [
            Bidirectional(layer, 1, 512, 256, d_state=d_state, dtype="float32")
            for layer, d_state in (("Mamba v2", 0), ("BiMamba2", 128), ("Hydra", 64))
        ],
        "cross": [CrossScan(1, 192, 28, 28, dtype="float32")],
        "update": [Update(1, 0, 1536, 16, "float32"), Update(4, 24, 64, 128, "float32")],
        "conv": [Conv(1, 2048, 1536, dtype="float32"), ConvUpdate(1, 1792, "float32")],
        "norm": [Norm("add", 2048, 768, "float32"), Norm("gated", 2048, 1536, "float32")],
        "decode": [
            Decode(layer, 1, dtype, new=16, passes=("step", "generate"))
            for layer in ("Mamba2", "Mamba1")
            for dtype in ("float32", "bfloat16")
        ],
        "train": [Train("Mamba2", 1, 128, 256, 4, mode, passes=("step",)) for mode in ("eager", "compiled")],
    },
}

# one sequence over several devices: across_ranks.py
ACROSS_RANKS = {
    "cuda": [
        Block(layer, 1, seqlen, 768, passes=("fwd", "fwd+bwd"))
        for layer in ("Mamba", "Mamba2")
        for seqlen in (131072, 1048576)
    ],
    "cpu": [Block(layer, 1, 8192, 256, dtype="float32", passes=("fwd", "fwd+bwd")) for layer in ("Mamba", "Mamba2")],
}

# ---- beside plain torch, on the CPU ----------------------------------------------------------------------------------

PLAIN_SCAN = Scan(1, 2048, 1536, 16, "float32")
PLAIN_SSDS = [
    Ssd(1, 2048, 24, 64, 128, "float32"),
    Ssd(1, 2048, 24, 64, 128, "bfloat16"),
    Ssd(1, 2048, 24, 64, 16, "float32"),
]
PLAIN_MAMBA3S = [Mamba3Scan(1, 2048, 24, dtype=dtype) for dtype in ("float32", "bfloat16")]
# the 130M size, and what llama.cpp calls the dtypes of its weights
BESIDE_LLAMA_CPP = {"layers": ("Mamba1", "Mamba2"), "types": ("f32", "bf16", "q8_0")}
PLAIN_BLOCK = Block("Mamba2", 1, 1024, 512, dtype="float32")

# transformers' models, small enough that their own path takes seconds
_ATTENTION = {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
_MAMBA1 = {"hidden_size": 256, "num_hidden_layers": 4, "state_size": 16}
TRANSFORMERS_MODELS = {
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "jamba": {"hidden_size": 256, "mamba_d_state": 16, **_ATTENTION},
    "mamba2": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "state_size": 64,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 128,
    },
    "bamba": {
        "hidden_size": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 128,
        **_ATTENTION,
    },
    "zamba2": {
        "hidden_size": 256,
        "n_mamba_heads": 8,
        "mamba_headdim": 64,
        "mamba_d_state": 64,
        "chunk_size": 128,
        **_ATTENTION,
    },
    "nemotron_h": {
        "hidden_size": 256,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "chunk_size": 128,
        "head_dim": 64,
        **_ATTENTION,
    },
}
TRANSFORMERS_BATCH, TRANSFORMERS_SEQLEN = 1, 256
TRANSFORMERS_PROMPT, TRANSFORMERS_NEW = 128, 32
TRANSFORMERS_REPEATS = 5
