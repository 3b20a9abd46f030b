"""The one door to torch's operator machinery. Everything else in mamba_ssm uses torch's public API, and this.

private.py: torch's private names and versions, and what is done without each. registration.py: how an operator is made,
registry.py: what torch keeps of it. derivatives.py: which derivatives it has beside the first. dispatch.py: how it is
called, compiled.py: how a function of several is in compiled programs. watching.py: who sees that. recording.py: what a
call does. plans.py: what later calls reuse of that, by the steps of plan_steps.py, in memory as plan_memory.py lays it
out, launched as graphs.py says. snapshots.py: whether a model has changed. records.py: how an operator's arguments are
named. autocast.py: what autocast is doing. modules.py: when a submodule is no more than its parameters. determinism.py:
whether results must repeat. reference.py: whether references run instead of kernels.
"""

from mamba_ssm._torch import derivatives, reference
from mamba_ssm._torch.autocast import (
    autocast_dtype,
    autocast_state,
    autocast_without_cache,
    no_autocast,
    traced_by_old_torch,
)
from mamba_ssm._torch.compiled import both_ways, run_operator
from mamba_ssm._torch.derivatives import Again
from mamba_ssm._torch.determinism import set_deterministic_mode, use_deterministic_mode
from mamba_ssm._torch.dispatch import (
    apply,
    call,
    call_below_autograd,
    call_in_backward,
    may_be_batched,
    outside_graphs,
    planned,
    refuse_second_derivatives,
    wants_one_node,
)
from mamba_ssm._torch.graphs import no_cuda_graphs
from mamba_ssm._torch.modules import is_bare, is_plain, module_behind, parameters_of, weight_and_bias
from mamba_ssm._torch.plans import forget as forget_plans
from mamba_ssm._torch.plans import forgotten as plans_forgotten
from mamba_ssm._torch.private import (
    COMPILES_FUNCTIONS,
    LOAD_REFUSES_PROGRAMS,
    DispatchMode,
    archive_names,
    current_stream,
    is_compiling,
    is_traced,
)
from mamba_ssm._torch.recording import (
    Recorded,
    look_at_values,
    note_call,
    pointer_offsets,
    record_calls,
    span,
    wrote_in_place,
)
from mamba_ssm._torch.records import flat, make, no_gradients, returns, signature, unpack, unpack_traced
from mamba_ssm._torch.registration import define, refuse_what_is_no_dense_tensor
from mamba_ssm._torch.snapshots import Snapshot, are_plain, places_of
from mamba_ssm._torch.watching import functions_watched, values_at_hand, watched

__all__ = [
    "COMPILES_FUNCTIONS",
    "LOAD_REFUSES_PROGRAMS",
    "Again",
    "DispatchMode",
    "Recorded",
    "Snapshot",
    "apply",
    "archive_names",
    "are_plain",
    "autocast_dtype",
    "autocast_state",
    "autocast_without_cache",
    "both_ways",
    "call",
    "call_below_autograd",
    "call_in_backward",
    "current_stream",
    "define",
    "derivatives",
    "flat",
    "forget_plans",
    "functions_watched",
    "is_bare",
    "is_compiling",
    "is_plain",
    "is_traced",
    "look_at_values",
    "make",
    "may_be_batched",
    "module_behind",
    "no_autocast",
    "no_cuda_graphs",
    "no_gradients",
    "note_call",
    "outside_graphs",
    "parameters_of",
    "places_of",
    "planned",
    "plans_forgotten",
    "pointer_offsets",
    "record_calls",
    "reference",
    "refuse_second_derivatives",
    "refuse_what_is_no_dense_tensor",
    "returns",
    "run_operator",
    "set_deterministic_mode",
    "signature",
    "span",
    "traced_by_old_torch",
    "unpack",
    "unpack_traced",
    "use_deterministic_mode",
    "values_at_hand",
    "wants_one_node",
    "watched",
    "weight_and_bias",
    "wrote_in_place",
]
