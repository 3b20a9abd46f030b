"""Both libraries refuse null and wrong arguments before they touch anything: the same codes in the same words.

The calls run in a process of their own, which sees no GPU: a check that is missing ends it, or ends in a CUDA error.
"""

import ctypes
import functools
import json
import os
import sys

import pytest
from _helpers.programs import run_script

from mamba_ssm._native import abi, loader, signatures

# {function: the struct that it is given}, of those that return a code and of those that return a size in bytes.
CALLS, SIZE_CALLS = (
    {
        name: parameters[0]._type_
        for name, (returned, parameters) in abi.FUNCTIONS.items()
        if returned is result and parameters and isinstance(parameters[0]._type_, type)  # not numbers, not texts
    }
    for result in (ctypes.c_int32, ctypes.c_int64)
)
SIZES = {
    abi.MambaSelectiveScan: {"batch": 1, "dim": 4, "seqlen": 80, "dstate": 4, "ngroups": 2, "segments": 1},
    abi.MambaCausalConv1d: {"batch": 1, "dim": 4, "seqlen": 8, "width": 4},
    abi.MambaCausalConv1dUpdate: {"batch": 1, "dim": 4, "seqlen": 2, "width": 4, "state_len": 3, "state_rows": 1},
    abi.MambaSelectiveStateUpdate: {
        "batch": 1,
        "seqlen": 1,
        "nheads": 4,
        "headdim": 4,
        "dstate": 4,
        "ngroups": 2,
        "state_rows": 1,
    },
    abi.MambaMamba2Step: {"batch": 1, "nheads": 4, "headdim": 4, "dstate": 4, "ngroups": 2, "width": 4, "state_len": 3},
    abi.MambaMambaStep: {"batch": 1, "dim": 4, "dt_rank": 2, "dstate": 4, "width": 4, "state_len": 3},
    abi.MambaLinear: {"rows": 2, "in_features": 4, "out_features": 3},
    abi.MambaSsd: {"batch": 1, "seqlen": 8, "nheads": 4, "headdim": 4, "ngroups": 2, "dstate": 4},
    abi.MambaMamba3: {
        "batch": 1,
        "sequences": 1,
        "seqlen": 8,
        "rank": 2,
        "nheads": 4,
        "headdim": 4,
        "ngroups": 2,
        "dstate": 4,
    },
    abi.MambaMamba3Inputs: {"rows": 2, "matrices": 2, "dstate": 4, "nheads": 4},
    abi.MambaNorm: {"rows": 2, "ngroups": 2, "group_size": 4},
    abi.MambaSwiglu: {"rows": 2, "width": 4},
    abi.MambaCrossEntropy: {"rows": 2, "vocabulary": 4},
    abi.MambaDequantize: {"rows": 2, "features": 4, "weight_rows": 2},
    abi.MambaGreedyToken: {"rows": 2, "vocabulary": 4},
    abi.MambaSequence: {"count": 0},
}
SIZES[abi.MambaSelectiveScanBackward] = {**SIZES[abi.MambaSelectiveScan], "slots": 1}
SIZES[abi.MambaSelectiveScanDoubleBackward] = SIZES[abi.MambaSelectiveScanBackward]
SIZES[abi.MambaCausalConv1dBackward] = SIZES[abi.MambaCausalConv1d]
SIZES[abi.MambaSsdBackward] = SIZES[abi.MambaSsd]
SIZES[abi.MambaSsdCarry] = {"batch": 2, "pieces": 2, "nheads": 2, "state_size": 4}
SIZES[abi.MambaMamba3Backward] = SIZES[abi.MambaMamba3]
SIZES[abi.MambaMamba3Step] = {**SIZES[abi.MambaMamba3], "seqlen": 1}
SIZES[abi.MambaMamba3InputsBackward] = SIZES[abi.MambaMamba3Inputs]
SIZES[abi.MambaNormBackward] = SIZES[abi.MambaNorm]
# What a call with these sizes cannot do without.
POINTERS = {
    "run_sequence": "",
    "selective_scan_forward": "u delta A B C out",
    "selective_scan_backward": "u delta A B C checkpoints dout du ddelta dA dB dC",
    "selective_scan_double_backward": "u delta A B C out dout u_tangent delta_tangent A_tangent B_tangent C_tangent "
    "dout_tangent ddelta out_tangent last_state_tangent du_tangent ddelta_tangent dA_tangent dB_tangent dC_tangent "
    "dinitial_state_tangent",
    "selective_scan_forward_carry": "u delta A B C workspace",
    "selective_scan_backward_carry": "u delta A B C workspace dout",
    "selective_scan_plan": "",
    "causal_conv1d_forward": "x weight out",
    "causal_conv1d_backward": "x weight dout dx dweight",
    "causal_conv1d_update": "x weight conv_state out",
    "selective_state_update": "state x dt A B C out",
    "mamba2_step": "zxBCdt conv_state conv_weight state dt_bias A_log D out",
    "mamba_step": "xz conv_state conv_weight x_proj_weight dt_proj_weight state A_log D out",
    "linear": "x weight out",
    "dequantize": "weight scales out",
    "greedy_token": "logits tokens",
    "ssd_forward": "x dt A B C",
    "ssd_backward": "x dt A B C dout dx ddt dA dB dC",
    "ssd_carry": "passed factors",
    "mamba3_forward": "q k v adt dt trap q_bias k_bias out",
    "mamba3_backward": "q k v adt dt trap q_bias k_bias dout dq dk dv dadt ddt dtrap dq_bias dk_bias",
    "mamba3_step": "q k v adt dt trap q_bias k_bias state_ssm state_k state_v out",
    "mamba3_inputs_forward": "q k dt a q_weight k_weight dt_bias q_out k_out dt_out adt_out",
    "mamba3_inputs_backward": "q k dt a q_weight k_weight dt_bias dq_out dk_out ddt_out dadt_out dq dk ddt da "
    "dq_weight dk_weight ddt_bias workspace",
    "norm_forward": "x weight out",
    "norm_backward": "x weight mean rstd dout dx dweight",
    "swiglu_forward": "xy out",
    "swiglu_backward": "xy dout dxy",
    "cross_entropy": "logits labels losses",
}
# what that plan is asked for; copies of gradients that are not written
UNREAD = {("selective_scan_plan", "segments"), ("selective_scan_backward_carry", "slots")}
# Pointers that are not needed until something else is given: [what is given, what is NULL then].
PAIRS = [
    ("selective_scan_backward", "z", "dz"),
    ("selective_scan_backward", "D", "dD"),
    ("selective_scan_backward", "delta_bias", "ddelta_bias"),
    ("causal_conv1d_backward", "bias", "dbias"),
    ("ssd_backward", "D", "dD"),
    ("ssd_backward", "dt_bias", "ddt_bias"),
    ("mamba3_forward", "ssm_state", "k_state"),
    ("mamba3_forward", "final_ssm", "final_k"),
    ("mamba3_step", "dt_bias", "q_weight"),
    ("mamba3_step", "q_weight", "dt_bias"),
    ("mamba3_backward", "D", "dD"),
    ("mamba3_backward", "z", "dz"),
    ("mamba3_backward", "mimo_out", "dmimo_out"),
    ("greedy_token", "sequences", "ends"),
    ("greedy_token", "ended", "eos"),
    ("norm_backward", "bias", "dbias"),
    ("norm_backward", "z", "dz"),
]
# Function, what differs from a good call (1 for a pointer: not NULL), error code, words.
OTHERS = [
    ("run_sequence", {"count": 1}, abi.ERROR_INVALID, "calls is NULL"),
    ("run_sequence", {"count": 1, "calls": 1}, abi.ERROR_INVALID, "function is NULL"),
    ("selective_scan_forward", {"dstate": 257}, abi.ERROR_UNSUPPORTED, "dstate must be in [1, 256], got 257"),
    ("selective_scan_forward", {"ngroups": 3}, abi.ERROR_INVALID, "ngroups must divide dim, got ngroups=3 dim=4"),
    ("selective_scan_forward", {"segments": 2}, abi.ERROR_INVALID, "workspace is NULL"),
    ("selective_scan_forward", {"segments": 9, "workspace": 1}, abi.ERROR_INVALID, "a segment of seqlen=80 empty"),
    ("selective_scan_backward", {"variable_B": 1, "dtype": abi.BFLOAT16}, abi.ERROR_INVALID, "workspace is NULL"),
    ("selective_scan_backward", {"variable_C": 1, "dC_dstate_stride": 81}, abi.ERROR_UNSUPPORTED, "must be contiguous"),
    ("selective_scan_forward", {"add": 1}, abi.ERROR_UNSUPPORTED, "add needs reverse"),
    ("selective_scan_backward", {"add": 1}, abi.ERROR_UNSUPPORTED, "add needs reverse"),
    ("selective_scan_double_backward", {"variable_B": 0}, abi.ERROR_UNSUPPORTED, "must vary, got variable_B=0"),
    ("selective_scan_double_backward", {"dtype": abi.BFLOAT16}, abi.ERROR_UNSUPPORTED, "must be float32, got bfloat16"),
    (
        "selective_scan_double_backward",
        {"delta_softplus": 1},
        abi.ERROR_UNSUPPORTED,
        "delta_softplus and add must be 0",
    ),
    ("selective_scan_double_backward", {"D": 1}, abi.ERROR_UNSUPPORTED, "D, z and delta_bias NULL"),
    ("selective_scan_double_backward", {"seqlen": 0}, abi.ERROR_INVALID, "seqlen must be at least 1, got 0"),
    ("selective_scan_forward_carry", {"seqlen": 0}, abi.ERROR_INVALID, "seqlen must be at least 1, got 0"),
    ("selective_scan_plan", {"dstate": 257}, abi.ERROR_UNSUPPORTED, "dstate must be in [1, 256], got 257"),
    ("causal_conv1d_forward", {"width": 1}, abi.ERROR_INVALID, "width must be in [2, 4], got 1"),
    ("causal_conv1d_forward", {"width": 5}, abi.ERROR_UNSUPPORTED, "width must be in [2, 4], got 5"),
    ("causal_conv1d_forward", {"seq_idx": 1, "final_states": 1}, abi.ERROR_INVALID, "seq_idx cannot be given"),
    ("causal_conv1d_forward", {"bias": 1, "bias_dtype": 7}, abi.ERROR_INVALID, "bias: dtype code 7"),
    ("causal_conv1d_backward", {"seq_idx": 1, "dfinal_states": 1}, abi.ERROR_INVALID, "seq_idx cannot be given"),
    ("causal_conv1d_backward", {"workspace": 1}, abi.ERROR_INVALID, "workspace must be NULL for 0 bytes"),
    ("causal_conv1d_update", {"state_len": 2}, abi.ERROR_INVALID, "state_len must be at least 3, got 2"),
    ("causal_conv1d_update", {"state_rows": 0}, abi.ERROR_INVALID, "state_rows must be at least 1, got 0"),
    ("selective_state_update", {"ngroups": 3}, abi.ERROR_INVALID, "ngroups must divide nheads, got ngroups=3 nheads=4"),
    ("selective_state_update", {"seqlen": 0}, abi.ERROR_INVALID, "seqlen must be at least 1, got 0"),
    ("selective_state_update", {"dstate": 257}, abi.ERROR_UNSUPPORTED, "dstate must be in [1, 256], got 257"),
    ("selective_state_update", {"state_rows": 0}, abi.ERROR_INVALID, "state_rows must be at least 1, got 0"),
    ("mamba2_step", {"headdim": 257}, abi.ERROR_UNSUPPORTED, "headdim must be in [1, 256], got 257"),
    ("mamba2_step", {"state_len": 2}, abi.ERROR_INVALID, "state_len must be at least 3, got 2"),
    ("mamba_step", {"dt_rank": 8193}, abi.ERROR_UNSUPPORTED, "dt_rank must be in [1, 8192], got 8193"),
    ("mamba_step", {"width": 5}, abi.ERROR_UNSUPPORTED, "width must be in [2, 4], got 5"),
    ("ssd_forward", {"headdim": 257}, abi.ERROR_UNSUPPORTED, "headdim must be in [0, 256], got 257"),
    ("ssd_forward", {"ngroups": 0}, abi.ERROR_INVALID, "ngroups must divide nheads, got ngroups=0 nheads=4"),
    ("ssd_backward", {"z": 1}, abi.ERROR_UNSUPPORTED, "takes neither z nor cu_seqlens"),
    ("mamba3_inputs_forward", {"dstate": 257}, abi.ERROR_UNSUPPORTED, "dstate must be in [1, 256], got 257"),
    ("norm_forward", {"group_size": 2**30 + 1}, abi.ERROR_UNSUPPORTED, "group_size must be in [1, 1073741824]"),
    ("norm_forward", {"other_dtype": 2}, abi.ERROR_INVALID, "must be float32 or of x's dtype, float32, got bfloat16"),
    ("norm_forward", {"z": 1, "residual": 1}, abi.ERROR_INVALID, "z cannot be given together with residual"),
    ("cross_entropy", {"vocabulary": 0}, abi.ERROR_INVALID, "vocabulary must be in [1, 1073741824], got 0"),
    ("cross_entropy", {"vocabulary": 2**31}, abi.ERROR_UNSUPPORTED, "vocabulary must be in [1, 1073741824]"),
    ("cross_entropy", {"gradient": 2}, abi.ERROR_UNSUPPORTED, "gradient must be in [0, 1], got 2"),
    ("dequantize", {"weight_rows": 3}, abi.ERROR_INVALID, "weight_rows must be rows = 2 without indices, got 3"),
    ("dequantize", {"indices": 1, "index_bytes": 2}, abi.ERROR_INVALID, "index_bytes must be 4 or 8, got 2"),
    ("greedy_token", {"vocabulary": 2**31}, abi.ERROR_UNSUPPORTED, "vocabulary must be in [1, 1073741824]"),
    ("greedy_token", {"ended": 1, "eos": 1}, abi.ERROR_INVALID, "eos_count must be at least 1, got 0"),
    ("norm_backward", {"dbias": 1}, abi.ERROR_INVALID, "dbias is given without bias"),
]


def good_call(name):
    """The fields of a call that nothing is wrong with."""
    fields = {**SIZES[CALLS[name]], **dict.fromkeys(POINTERS[name].split(), 1), "num_threads": 1}
    if name == "ssd_forward":
        fields["out"] = 1  # with neither out nor final_state there is nothing to do
    if name in ("ssd_backward", "mamba3_backward", "mamba_step"):
        fields["workspace"] = 1
    if name == "selective_scan_double_backward":
        fields["variable_B"] = fields["variable_C"] = 1
    return fields


def dtype_fields(struct):
    for name, kind, *_ in struct._fields_:
        if name in ("run", "forward", "scan"):
            yield from dtype_fields(kind)
        elif name.endswith("dtype"):
            yield name


def wrong_calls():
    """[function, fields, code, words], one thing wrong in each."""
    calls = []
    for name in POINTERS:
        struct, good = CALLS[name], good_call(name)
        calls += [
            [name, {**good, size: -1}, abi.ERROR_INVALID, size] for size in SIZES[struct] if (name, size) not in UNREAD
        ]
        calls += [[name, {**good, field: 0}, abi.ERROR_INVALID, f"{field} is NULL"] for field in POINTERS[name].split()]
        optional = {"bias_dtype": "bias", "D_dtype": "D", "dt_bias_dtype": "dt_bias"}
        optional.update(conv_bias_dtype="conv_bias", norm_weight_dtype="norm_weight", residual_dtype="norm_weight")
        for field in dtype_fields(struct):
            given = {optional[field]: 1} if field in optional else {}
            words = "residual and z" if field == "other_dtype" else "dtype code 7 is none of"
            calls.append([name, {**good, **given, field: 7}, abi.ERROR_INVALID, words])
    calls += [
        [name, {**good_call(name), given: 1}, abi.ERROR_INVALID, f"{field} is NULL"] for name, given, field in PAIRS
    ]
    calls += [[name, {**good_call(name), **change}, code, words] for name, change, code, words in OTHERS]
    return calls


def size_calls():
    """[function, fields] of the functions that return a count."""
    calls = []
    for name, struct in SIZE_CALLS.items():
        good = {**SIZES[struct], "num_threads": 1, "out": 1}
        calls += [[name, {**good, size: value}] for size in SIZES[struct] for value in (-1, 0)]
    return calls


def make_calls(library, wrong, sizes):
    """What the other process does: {kind: answers}."""
    functions = signatures.bind(ctypes.CDLL(library))
    memory = ctypes.create_string_buffer(1 << 20)

    def fill(struct, fields):
        params = struct()
        kinds = {}
        for kind in (struct, *(kind for name, kind, *_ in struct._fields_ if name in ("run", "forward", "scan"))):
            kinds.update({name: kind for name, kind, *_ in kind._fields_})
        for name in kinds:
            if name.endswith("_stride"):
                setattr(params, name, 1)
        for name, value in fields.items():
            setattr(params, name, ctypes.addressof(memory) if value and kinds.get(name) is ctypes.c_void_p else value)
        return params

    def call(name, params):
        more = (0, ctypes.byref(abi.MambaSelectiveScanPlan())) if name == "selective_scan_plan" else ()
        code = functions[name](params, *more)
        return [code, functions["last_error"]().decode() if code else ""]

    answers = {"null": {name: call(name, None) for name in CALLS}}
    plan = functions["selective_scan_plan"](fill(abi.MambaSelectiveScan, good_call("selective_scan_plan")), 0, None)
    answers["null plan"] = [plan, functions["last_error"]().decode()]
    answers["null size"] = {name: functions[name](None) for name in SIZE_CALLS}
    answers["wrong"] = [call(name, fill(CALLS[name], fields)) for name, fields, *_ in wrong]
    answers["size"] = [functions[name](fill(SIZE_CALLS[name], fields)) for name, fields in sizes]
    answers["good"] = {name: call(name, fill(CALLS[name], good_call(name))) for name in POINTERS}
    answers["empty"] = {name: call(name, CALLS[name]()) for name in POINTERS}
    return answers


@functools.cache
def ask(kind):
    """The answers of a library."""
    path = loader.library_path(kind)
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    calls = json.dumps([str(path), wrong_calls(), size_calls()])
    done = run_script(__file__, calls, environ={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert done.returncode == 0, f"a call ended the process, exit status {done.returncode}:\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


@pytest.fixture(params=["cpu", "cuda"])
def answers(request):
    return ask(request.param)


def test_null_params(answers):
    for name, (code, message) in answers["null"].items():
        what = "info" if name == "library_info" else "params"
        assert (code, message) == (abi.ERROR_INVALID, f"{name}: {what} is NULL")
    assert answers["null plan"] == [abi.ERROR_INVALID, "selective_scan_plan: plan is NULL"]
    assert answers["null size"] == dict.fromkeys(SIZE_CALLS, 0)


def test_wrong_arguments(answers):
    for (name, fields, code, words), (got, message) in zip(wrong_calls(), answers["wrong"], strict=True):
        assert got == code and message.startswith(f"{name}: ") and words in message, (name, fields, got, message)


def test_wrong_sizes_of_workspaces(answers):
    for (name, fields), got in zip(size_calls(), answers["size"], strict=True):
        assert got >= 0, (name, fields, got)


@pytest.mark.parametrize("kind,expected", [("cpu", abi.OK), ("cuda", abi.ERROR_DRIVER)])
def test_the_rest_of_those_calls_is_right(kind, expected):
    """On the CPU they succeed; mamba_cuda lets them pass and then finds no GPU. Two calls never seek one: a sequence of
    no calls, and the one that it has no kernel for.
    """
    others = {"run_sequence": abi.OK}
    if kind == "cuda":
        others["selective_scan_double_backward"] = abi.ERROR_UNSUPPORTED
    for name, (code, message) in ask(kind)["good"].items():
        assert code == others.get(name, expected), (name, message)


def test_structs_of_zeros(answers):
    for name, (code, message) in answers["empty"].items():
        assert code in (abi.OK, abi.ERROR_INVALID), (name, code, message)


def test_both_say_the_same():
    cpu, cuda = ask("cpu"), ask("cuda")
    assert cpu["wrong"] == cuda["wrong"]


if __name__ == "__main__":
    print(json.dumps(make_calls(*json.loads(sys.argv[1]))))
