"""How the weights of a language model start."""

import math

import torch
import torch.nn as nn


def init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Embeddings normal, biases zero, and the projections that end in the residual scaled down by the square root of
    their number (GPT-2, section 2.3), so that its variance does not grow with depth. For nn.Module.apply.
    """
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if not rescale_prenorm_residual:
        return
    for name in ("out_proj", "fc2"):
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is not None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            with torch.no_grad():
                weight /= math.sqrt(n_residuals_per_layer * n_layer)
