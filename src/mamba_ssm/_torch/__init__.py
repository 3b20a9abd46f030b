"""The one door to torch's operator machinery: registration, dispatch and autocast. All else uses torch's public API."""

from mamba_ssm._torch.autocast import autocast_dtype, no_autocast, traced_by_old_torch
from mamba_ssm._torch.operators import (
    apply,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    exported_by_dynamo,
    is_compiling,
    refuse_second_derivatives,
    refuse_what_is_no_dense_tensor,
    unwatched,
    wants_one_node,
    watched,
    wrote_in_place,
)
from mamba_ssm._torch.records import no_gradients, signature, unpack

__all__ = [
    "apply",
    "autocast_dtype",
    "call",
    "call_below_autograd",
    "call_in_backward",
    "define",
    "exported_by_dynamo",
    "is_compiling",
    "no_autocast",
    "no_gradients",
    "refuse_second_derivatives",
    "refuse_what_is_no_dense_tensor",
    "signature",
    "traced_by_old_torch",
    "unpack",
    "unwatched",
    "wants_one_node",
    "watched",
    "wrote_in_place",
]
