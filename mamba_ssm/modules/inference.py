"""What blocks read of inference_params: any object that has it will do, not only utils.generation.InferenceParams."""

import typing

import torch


class InferenceCache(typing.Protocol):
    """For the state space blocks. seqlen_offset: tokens before these. key_value_memory_dict: states by layer_idx."""

    @property
    def seqlen_offset(self) -> int: ...

    @property
    def key_value_memory_dict(self) -> dict[int, typing.Any]: ...


class AttentionCache(InferenceCache, typing.Protocol):
    """For MHA. max_seqlen: tokens that its cache holds. lengths_per_sample: (B) each row's own offset, or None."""

    @property
    def max_seqlen(self) -> int: ...

    @property
    def lengths_per_sample(self) -> torch.Tensor | None: ...
