"""Every private name of torch that this package uses, and every question about torch's version. Nothing else looks.

torch has no public name for some things that a fast operator must know. Each is looked up here, once, and there is a
way without each, so that a torch that renames or drops one makes calls slower, never wrong, and importing never fails:

| private name | for what | without it |
|---|---|---|
| `_C._AutoDispatchBelowAutograd` | skips an operator's Autograd kernel | a second operator without one |
| `_C._len_torch_dispatch_stack` | whether a dispatch mode is active | calls go through torch's dispatcher, |
| `_C._are_functorch_transforms_active` | ... a transform of torch.func | which is always right |
| `_C._get_tracing_state` | ... torch.jit.trace | " |
| `autograd._profiler_enabled` | ... a profiler | " |
| `_C._dispatch_tls_is_dispatch_key_included`, | ... a tracer before dispatch, or vmap | " |
| `_C.DispatchKey`, `_C._parse_dispatch_key` | " | " |
| `autograd.forward_ad._current_level` | ... forward-mode derivatives | " |
| `_C._FunctionBase.apply` | an autograd.Function past torch.func | torch's own apply |
| `_C._cuda_getCurrentRawStream` | the current stream's handle | torch.cuda.current_stream |
| `_C._get_cublas_allow_tf32`, | what products depend on | no graphs of plans |
| `_C._get_fp32_precision_getter` and its like | " | " |
| `_C._cuda_beginAllocateCurrentThreadToPool` | whether torch.cuda.use_mem_pool is a thread's own | no graphs of plans |
| `_C._dynamo.guards.TensorGuards` | whether tensors are alike, for calls by a plan | a key of all that is compared |
| `_dynamo.symbolic_convert.InstructionTranslator` | whether torch.export is tracing | torch.compiler's word |
| `_subclasses.FakeTensorMode`, | what a function returns | compiled layers are not one operator each |
| `UntypedStorage._cdata` | " | " |
| `_library.utils.get_layout_constraint_tag`, | what the compiler takes as it is | deep models: minutes |
| `_inductor.lowering.make_fallback` and its like | " | " |
| `_utils.is_compiling` | whether torch 2.2 or 2.3 is compiling | torch.compiler's word |
| `Module._forward_hooks` and its like | whether a module has hooks | it is called as if it had |
| `Module._parameters` | a parameter without attribute look-up | the attribute; no recorded steps |
| `nn.modules.module._global_forward_hooks`, ... | whether all modules have hooks | no recorded steps, more nodes |
| `_C._len_torch_function_stack` | whether a torch function mode is active | no recorded steps |
| `utils._python_dispatch.TorchDispatchMode` | what a model or a call runs | attention_maps raises; no plans |
| `_C._push_on_torch_dispatch_stack`, | ... in this thread alone | no plans |
| `_C._pop_torch_dispatch_stack` | " | " |
| `_C.PyTorchFileReader` | what a torch.save archive holds | torch >= 2.6 refuses programs itself; else no archive |

tests/_torch takes each name away in turn.
"""

import os
import sys
import typing
from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad

LOOKED_UP = []  # for the tests: paths below torch


def _find(path):
    """torch's object of this dotted path, None where this torch has none."""
    LOOKED_UP.append(path)
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# ---- versions --------------------------------------------------------------------------------------------------------

# torch 2.4: autocast is asked about by device type, and the compiler follows autograd.Functions.
SINCE_2_4 = hasattr(torch, "get_autocast_dtype")
# torch 2.6: an exported program keeps an autograd.Function as a node, and weights_only refuses TorchScript.
EXPORT_KEEPS_NODES = LOAD_REFUSES_PROGRAMS = hasattr(torch.compiler, "set_stance")
# torch 2.6: a dispatch mode may keep what operators return in inference mode; 2.2 and 2.4 raise.
MODES_KEEP_INFERENCE = EXPORT_KEEPS_NODES
# Not torch.compiler.is_compiling on torch 2.2 and 2.3: their tracer does not know it.
is_compiling = (None if SINCE_2_4 else _find("_utils.is_compiling")) or torch.compiler.is_compiling

# ---- what is active; None: this torch does not say -------------------------------------------------------------------

dispatch_modes = _find("_C._len_torch_dispatch_stack")
function_modes = _find("_C._len_torch_function_stack")
transforms_active = _find("_C._are_functorch_transforms_active")
tracing_state = _find("_C._get_tracing_state")
profiling = _find("autograd._profiler_enabled")
key_included = _find("_C._dispatch_tls_is_dispatch_key_included")
PRE_DISPATCH = _find("_C.DispatchKey.PreDispatch")
_parse_key = _find("_C._parse_dispatch_key")
VMAP_MODE = None if _parse_key is None else _parse_key("VmapMode")
_dual_level = _find("autograd.forward_ad._current_level")

ALL_KNOWN = None not in (
    dispatch_modes,
    transforms_active,
    tracing_state,
    profiling,
    key_included,
    PRE_DISPATCH,
    _dual_level,
)


def forward_mode_active():
    """Whether a tensor may carry a tangent."""
    return _dual_level is None or forward_ad._current_level >= 0


def dynamo_exports():
    """The tracer's word: torch.compiler.is_exporting is missing in 2.6, and true for torch.compile in 2.7 and 2.8."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return bool(InstructionTranslator.current_tx().export)
    except (ImportError, AttributeError):  # another torch, or compiled or exported by another tracer
        return getattr(torch.compiler, "is_exporting", bool)()


# As torch.compiler.assume_constant_result does, which would import the whole compiler now.
dynamo_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute

# ---- what is done ----------------------------------------------------------------------------------------------------

# A context in which operators skip their Autograd kernels; None: registration.py defines operators without one.
below_autograd = _find("_C._AutoDispatchBelowAutograd")
PLAIN_APPLY = _find("_C._FunctionBase.apply") is not None


def _public_stream(index):
    return torch.cuda.current_stream(index).cuda_stream


current_stream = _find("_C._cuda_getCurrentRawStream") or _public_stream

# torch 2.8: a pool of memory that takes one thread's allocations.
_POOLS_KNOWN = _find("_C._cuda_beginAllocateCurrentThreadToPool") is not None and hasattr(torch.cuda, "MemPool")
# torch 2.9. Where its newer setting was made alone, to read allow_tf32 raises.
_fp32_precision = _find("_C._get_fp32_precision_getter")
_PRODUCT_SETTINGS = [
    _find("_C._get_cublas_allow_tf32") if _fp32_precision is None else partial(_fp32_precision, "cuda", "matmul"),
    _find("_C._get_cublas_allow_fp16_reduced_precision_reduction"),
    _find("_C._get_cublas_allow_bf16_reduced_precision_reduction"),
    _find("_C._get_blas_preferred_backend"),
]
_newer = _find("_C._get_cublas_allow_fp16_accumulation"), _find("_C._get_sm_carveout_experimental")
GRAPHS_KNOWN = _POOLS_KNOWN and None not in _PRODUCT_SETTINGS
_PRODUCT_SETTINGS += [setting for setting in _newer if setting is not None]


def product_settings():
    """What torch's products on a GPU depend on beside their tensors."""
    return tuple([setting() for setting in _PRODUCT_SETTINGS])


def allocates_natively():
    """Whether torch's own caching allocator gives memory on GPUs, which alone has pools."""
    cached = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    return cached and torch.cuda.get_allocator_backend() == "native"


# From torch 2.8 on: others were not tried, and whatever goes wrong in there ends the process.
_TensorGuards = _find("_C._dynamo.guards.TensorGuards") if GRAPHS_KNOWN else None


def tensor_check(tensors):
    """A function of as many tensors: whether each has the type, dtype, device, shape, strides, requires_grad and
    dispatch keys (negated views, inference mode, autocast) of its counterpart here. Not of nested tensors. None: this
    torch has no such one.
    """
    if _TensorGuards is None or not tensors:
        return None
    sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
    try:
        return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError, SystemError):  # other arguments than today's
        return None


# ---- what compilers trace --------------------------------------------------------------------------------------------

FakeTensorMode: typing.Any = _find("_subclasses.FakeTensorMode")
# torch 2.8: what compiled.py was tried with.
COMPILES_FUNCTIONS = GRAPHS_KNOWN and FakeTensorMode is not None and hasattr(torch.UntypedStorage, "_cdata")
# Whether the compiler reads the Python that runs now. is_compiling also says so of what the compiler calls meanwhile,
# such as fakes, and from torch 2.13 on of all threads.
is_traced = torch.compiler.is_dynamo_compiling if GRAPHS_KNOWN else is_compiling
_layout_constraint_tag = _find("_library.utils.get_layout_constraint_tag") if COMPILES_FUNCTIONS else None


def take_as_it_is(op):
    """Has torch's own compiler, if it is compiling a program, take an operator as it is.

    It does so anyway when it meets the operator first, but up to torch 2.12 it then writes down, for a log that nobody
    reads, what the operator's arguments are made of. That doubles with each operator before it that gives two tensors
    to the next, as layers do: eight seconds for a model of 24 layers, more than two minutes for 48.
    """
    lowering: typing.Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or _layout_constraint_tag is None or op in getattr(lowering, "lowerings", [op]):
        return
    try:
        lowering.make_fallback(op, lowering.tag_to_layout_constraint(_layout_constraint_tag(op)))
    except (AttributeError, TypeError):  # another torch, whose compiler will do it
        pass


def storage_of(tensor):
    """What tensors that share memory have in common, fake ones too."""
    return tensor.untyped_storage()._cdata


# ---- modules ---------------------------------------------------------------------------------------------------------

_MODULE = torch.nn.Identity()
HOOKS_KNOWN = all(
    hasattr(_MODULE, hooks)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
PARAMETERS_KNOWN = hasattr(_MODULE, "_parameters") and hasattr(_MODULE, "_buffers")
_GLOBAL_HOOKS = [
    _find(f"nn.modules.module._global_{kind}_hooks") for kind in ("backward_pre", "backward", "forward_pre", "forward")
]
GLOBAL_HOOKS_KNOWN = None not in _GLOBAL_HOOKS


def has_global_hooks():
    """Whether torch has hooks that see all modules, or does not say."""
    return not GLOBAL_HOOKS_KNOWN or any(_GLOBAL_HOOKS)


# ---- what runs ------------------------------------------------------------------------------------------------------

_Mode: typing.Any = _find("utils._python_dispatch.TorchDispatchMode")
DispatchMode: typing.Any = object
if _Mode is not None:

    class DispatchMode(_Mode):  # type: ignore[no-redef]
        """torch's, without loading the compiler at the first operator: that takes seconds, and holds process groups.
        Nothing compiles within this package's modes.
        """

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False


push_mode: typing.Any = _find("_C._push_on_torch_dispatch_stack")
pop_mode: typing.Any = _find("_C._pop_torch_dispatch_stack")
MODES_KNOWN = None not in (push_mode, pop_mode) and DispatchMode is not object

# ---- files -----------------------------------------------------------------------------------------------------------

_archive_records = _find("_C.PyTorchFileReader.get_all_records")


def archive_names(file):
    """The names in a torch.save archive as torch reads it; in a forged one, zipfile may find others. None: this torch
    does not say.
    """
    return None if _archive_records is None else _archive_records(torch._C.PyTorchFileReader(file))
