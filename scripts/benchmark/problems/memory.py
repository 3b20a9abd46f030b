"""The memory of a training step on a GPU."""

import torch


def memory_of_training(forward, backward):
    """Megabytes that forward() keeps for backward beside its output, and the most that both need at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    gradients = backward(out)  # held until the peak is read
    peak = torch.cuda.max_memory_allocated() - before
    del out, gradients
    return {"kept": kept * 1e-6, "peak": peak * 1e-6}
