"""What the layers of a model keep between calls."""

from dataclasses import dataclass, field

import torch


@dataclass
class InferenceParams:
    """What the layers of a model keep between calls.

    max_seqlen: tokens that the cache of an attention layer holds. max_batch_size: rows.
    seqlen_offset: tokens that went in before this call; 0: the call fills the states.
    batch_size_offset: upstream's; not used.
    key_value_memory_dict: {layer index: its states}, made by the layers at the first call where they are missing.
    lengths_per_sample: (B) int32 or None; where given, attention takes a step's position from it, row by row.

    Same as upstream's mamba_ssm.utils.generation.InferenceParams.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None
    # decode's: between its steps no code of others runs that may change the model or its states
    undisturbed: bool = field(default=False, init=False, repr=False, compare=False)

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Ready for new sequences; the states stay allocated, the next first call overwrites them."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
