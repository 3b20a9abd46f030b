"""transformers' Mamba models twice in one process: as they are with mamba_ssm installed, and as they are without it.
With it, causal_conv1d may be installed too.

transformers (5.17 and newer) looks for mamba_ssm's functions when a modeling module is imported, and binds them there.
Shared by tests/test_transformers.py and the benchmark.
"""

import contextlib
import functools
import importlib
import sys
from collections import Counter

import torch

OLDEST = (5, 17)

# The functions that transformers binds, and where it finds them.
FUNCTIONS = {
    "selective_scan_fn": "mamba_ssm.ops.selective_scan_interface",
    "mamba_inner_fn": "mamba_ssm.ops.selective_scan_interface",
    "selective_state_update": "mamba_ssm.ops.triton.selective_state_update",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "mamba_split_conv1d_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
}
CONVOLUTIONS = {"causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d"}

_MAMBA1 = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
# {model type: (class, configuration of a tiny model)}; each hybrid has at least one attention layer. Mamba2 and Bamba
# have one group: in older versions their own gated norm did not know of groups, but their fused path did.
TINY = {
    "mamba": ("MambaForCausalLM", _MAMBA1),
    "falcon_mamba": ("FalconMambaForCausalLM", _MAMBA1),
    "jamba": (
        "JambaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            **_ATTENTION,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            **_ATTENTION,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            **_ATTENTION,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            **_ATTENTION,
        },
    ),
    "zamba": (
        "ZambaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "chunk_size": 8,
            **_ATTENTION,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "head_dim": 8,
            **_ATTENTION,
        },
    ),
}


@contextlib.contextmanager
def _counted(calls, functions):
    """These functions count their calls while this is active, and for whoever binds them meanwhile."""
    with contextlib.ExitStack() as stack:
        for name, path in functions.items():
            module = importlib.import_module(path)
            function = getattr(module, name)

            @functools.wraps(function)
            def counting(*args, name=name, function=function, **kwargs):
                calls[name] += 1
                return function(*args, **kwargs)

            for place in (module, sys.modules["mamba_ssm"]):
                if hasattr(place, name):
                    stack.callback(setattr, place, name, getattr(place, name))
                    setattr(place, name, counting)
        yield


@contextlib.contextmanager
def _hidden(package):
    """The package cannot be imported while this is active."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    for name in ours:
        del sys.modules[name]
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(ours)


def model_class(kind, packages, calls=None):
    """A fresh import of transformers' class where these of mamba_ssm and causal_conv1d are installed; calls, a Counter,
    counts by name what it calls of them.
    """
    path = f"transformers.models.{kind}.modeling_{kind}"
    before = sys.modules.pop(path, None)
    try:
        with contextlib.ExitStack() as stack:
            for package, functions in (("mamba_ssm", FUNCTIONS), ("causal_conv1d", CONVOLUTIONS)):
                if package in packages:
                    importlib.import_module(package)
                    stack.enter_context(_counted(Counter() if calls is None else calls, functions))
                else:
                    stack.enter_context(_hidden(package))
            module = importlib.import_module(path)
    finally:
        sys.modules.pop(path, None)
        if before is not None:
            sys.modules[path] = before
    return getattr(module, TINY[kind][0])


def model_pair(kind, config, device="cpu", dtype=torch.float32, packages=("mamba_ssm",)):
    """(model with the packages, model without, Counter of the first one's calls)."""
    (ours, theirs), calls = same_models(kind, config, (packages, ()), device, dtype)
    return ours, theirs, calls


def same_models(kind, config, installed, device="cpu", dtype=torch.float32):
    """([a model for each group of packages that are installed], Counter of the first one's calls), all of the same
    random weights.

    The weights are larger than transformers' initial ones, so that the scan takes part in the result.
    """
    calls = Counter()
    first, *others = (model_class(kind, packages, calls) for packages in installed)
    torch.manual_seed(0)
    config = first.config_class(vocab_size=50, pad_token_id=0, **config) if isinstance(config, dict) else config
    model = first(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (parameter.dim() > 1 or name.endswith("conv1d.bias")) and not name.endswith("A_log"):
                parameter.normal_(std=0.3)
    models = [model, *(other(config) for other in others)]
    for other in models[1:]:
        other.load_state_dict(model.state_dict())
    return [model.to(device, dtype) for model in models], calls
