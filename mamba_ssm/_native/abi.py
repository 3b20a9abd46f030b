"""The C ABI of csrc/include in ctypes: constants, structs, functions. Written by scripts/generate_abi.py; do not edit.

Structs inside structs are anonymous, so their fields are set directly: ``params.stream``, not ``params.run.stream``.
"""

import typing
from ctypes import POINTER, Structure, c_char, c_char_p, c_float, c_int32, c_int64, c_void_p

OK = 0
ERROR_INVALID = 1
ERROR_UNSUPPORTED = 2
ERROR_DTYPE_DISABLED = 3
ERROR_CUDA = 4
ERROR_NO_KERNEL_IMAGE = 5
ERROR_DRIVER = 6
ERROR_MEMORY = 7
ERROR_INDEX = 8
FLOAT32 = 0
FLOAT16 = 1
BFLOAT16 = 2
INT8 = 3
INT8_BLOCK = 32
SCAN_CHECKPOINT = 64
MAX_DSTATE = 256
MAX_HEADDIM = 256
MAX_RANK = 64
MAX_DT_RANK = 8192
MAX_NORM_GROUP = 1073741824
MAX_LINEAR_NORM = 2048
ABI_VERSION = 17


def _fields(text: str, /, **structs: typing.Any) -> list[tuple[str, typing.Any]]:
    """Field list from lines of "type: names", so that a struct reads like its declaration."""
    kinds = {"i32": c_int32, "i64": c_int64, "f32": c_float, "ptr": c_void_p, **structs}
    fields = []
    for line in text.split(";"):
        kind, names = line.split(":")
        fields += [(name.strip(), kinds[kind.strip()]) for name in names.split(",")]
    return fields


class MambaRun(Structure):
    _fields_ = _fields("ptr: stream; i32: device, num_threads")


class MambaCall(Structure):
    _fields_ = _fields("ptr: function, params")


class MambaSequence(Structure):
    _fields_ = _fields("i64: count; ptr: calls")


class MambaSelectiveScan(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, dim, seqlen, dstate, ngroups;
        i32: dtype, delta_softplus, variable_B, variable_C;
        ptr: u, delta, z, A, B, C, D, delta_bias, initial_state, seq_idx, out, last_state;
        i64: segments;
        ptr: workspace, checkpoints;
        i64: u_batch_stride, u_dim_stride, delta_batch_stride, delta_dim_stride, z_batch_stride, z_dim_stride,
             B_batch_stride, B_group_stride, B_dstate_stride, C_batch_stride, C_group_stride, C_dstate_stride,
             out_batch_stride, out_dim_stride;
        i32: carried, reverse, add
        """,
        MambaRun=MambaRun,
    )


class MambaSelectiveScanPlan(Structure):
    _fields_ = _fields("i64: forward_segments, backward_segments, slots, backward_workspace")


class MambaSelectiveScanBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaSelectiveScan: forward;
        ptr: dout;
        i64: dout_batch_stride, dout_dim_stride;
        ptr: dlast_state;
        i64: slots;
        ptr: du, ddelta, dz, dA, dB, dC, dD, ddelta_bias, dinitial_state;
        i64: du_batch_stride, du_dim_stride, ddelta_batch_stride, ddelta_dim_stride, dz_batch_stride, dz_dim_stride,
             dB_batch_stride, dB_group_stride, dB_dstate_stride, dC_batch_stride, dC_group_stride, dC_dstate_stride
        """,
        MambaSelectiveScan=MambaSelectiveScan,
    )


class MambaSelectiveScanDoubleBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaSelectiveScan: forward;
        ptr: dout, dlast_state, u_tangent, delta_tangent, A_tangent, B_tangent, C_tangent, initial_state_tangent,
             dout_tangent;
        i64: slots;
        ptr: ddelta, out_tangent, last_state_tangent, du_tangent, ddelta_tangent, dA_tangent, dB_tangent, dC_tangent,
             dinitial_state_tangent
        """,
        MambaSelectiveScan=MambaSelectiveScan,
    )


class MambaSsd(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, seqlen, nheads, headdim, ngroups, dstate;
        i32: dtype, dt_dtype, A_dtype, dt_bias_dtype, A_is_log, dt_softplus;
        f32: dt_min, dt_max;
        ptr: x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, cu_seqlens, out, final_state, workspace;
        i64: x_batch_stride, x_len_stride, x_head_stride, dt_batch_stride, dt_len_stride, dt_head_stride,
             B_batch_stride, B_len_stride, B_group_stride, C_batch_stride, C_len_stride, C_group_stride, D_head_stride,
             D_dim_stride, z_batch_stride, z_len_stride, z_head_stride, out_batch_stride, out_len_stride,
             out_head_stride
        """,
        MambaRun=MambaRun,
    )


class MambaSsdBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaSsd: forward;
        ptr: dout, dfinal_state, dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_state;
        i64: dout_batch_stride, dout_len_stride, dout_head_stride, dx_batch_stride, dx_len_stride, dx_head_stride,
             ddt_batch_stride, ddt_len_stride, ddt_head_stride, dB_batch_stride, dB_len_stride, dB_group_stride,
             dC_batch_stride, dC_len_stride, dC_group_stride
        """,
        MambaSsd=MambaSsd,
    )


class MambaSsdCarry(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, pieces, nheads, state_size;
        i32: reverse, reserved;
        ptr: passed, factors, initial, before, last, product;
        i64: passed_batch_stride, passed_piece_stride, factors_batch_stride, factors_piece_stride, factors_head_stride
        """,
        MambaRun=MambaRun,
    )


class MambaMamba3(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles;
        i32: dtype, adt_dtype, dt_dtype, trap_dtype, angle_dtype, pairwise, angles_of_heads;
        f32: norm_eps;
        ptr: q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z, mimo_v, mimo_z, mimo_out, norm_weight, angle_state,
             ssm_state, k_state, v_state, seq_idx, cu_seqlens;
        i64: sequences;
        ptr: out, final_angle, final_ssm, final_k, final_v, workspace;
        i64: q_batch_stride, q_len_stride, q_rank_stride, q_group_stride, k_batch_stride, k_len_stride, k_rank_stride,
             k_group_stride, v_batch_stride, v_len_stride, v_head_stride, adt_batch_stride, adt_len_stride,
             adt_head_stride, dt_batch_stride, dt_len_stride, dt_head_stride, trap_batch_stride, trap_len_stride,
             trap_head_stride, angle_batch_stride, angle_len_stride, angle_head_stride, z_batch_stride, z_len_stride,
             z_head_stride, out_batch_stride, out_len_stride, out_rank_stride, out_head_stride
        """,
        MambaRun=MambaRun,
    )


class MambaMamba3Backward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaMamba3: forward;
        ptr: dout, dfinal_angle, dfinal_ssm, dfinal_k, dfinal_v, dq, dk, dv, dadt, ddt, dtrap, dq_bias, dk_bias,
             dangles, dD, dz, dmimo_v, dmimo_z, dmimo_out, dnorm_weight, dangle_state, dssm_state, dk_state, dv_state;
        i64: dout_batch_stride, dout_len_stride, dout_rank_stride, dout_head_stride, dv_step_stride, dz_step_stride,
             dtrap_step_stride, dangle_step_stride
        """,
        MambaMamba3=MambaMamba3,
    )


class MambaMamba3Step(Structure):
    _anonymous_ = ("scan",)
    _fields_ = _fields(
        """
        MambaMamba3: scan;
        i32: ssm_dtype, k_dtype, v_dtype, parameter_dtype, weight_dtype, A_softplus;
        f32: A_floor, q_eps, k_eps;
        i32: reserved;
        ptr: dt_bias, q_weight, k_weight, state_angle, state_ssm, state_k, state_v
        """,
        MambaMamba3=MambaMamba3,
    )


class MambaMamba3Inputs(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, matrices, dstate, nheads;
        i32: dtype, q_weight_dtype, k_weight_dtype, A_softplus;
        f32: A_floor, q_eps, k_eps;
        i32: reserved;
        ptr: q, k, dt, a, q_weight, k_weight, dt_bias, q_out, k_out, dt_out, adt_out;
        i64: row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaMamba3InputsBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaMamba3Inputs: forward;
        ptr: dq_out, dk_out, ddt_out, dadt_out, dq, dk, ddt, da, dq_weight, dk_weight, ddt_bias, workspace;
        i64: drow_stride
        """,
        MambaMamba3Inputs=MambaMamba3Inputs,
    )


class MambaCausalConv1d(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, dim, seqlen;
        i32: width, silu, dtype, weight_dtype, bias_dtype, reserved;
        ptr: x, weight, bias, seq_idx, initial_states, out, final_states;
        i64: x_batch_stride, x_dim_stride, x_len_stride, out_batch_stride, out_dim_stride, out_len_stride,
             initial_batch_stride, initial_dim_stride, initial_len_stride, final_batch_stride, final_dim_stride,
             final_len_stride
        """,
        MambaRun=MambaRun,
    )


class MambaCausalConv1dBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaCausalConv1d: forward;
        ptr: dout, dx;
        i64: dout_batch_stride, dout_dim_stride, dout_len_stride, dx_batch_stride, dx_dim_stride, dx_len_stride;
        ptr: dfinal_states, dinitial_states, workspace, dweight, dbias;
        i32: add
        """,
        MambaCausalConv1d=MambaCausalConv1d,
    )


class MambaCausalConv1dUpdate(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, dim, seqlen, state_len;
        i32: width, silu, dtype, state_dtype, weight_dtype, bias_dtype;
        ptr: x, conv_state, weight, bias, cache_seqlens, conv_state_indices, out;
        i64: state_rows, x_batch_stride, x_dim_stride, x_len_stride, state_row_stride, state_dim_stride,
             state_len_stride, out_batch_stride, out_dim_stride, out_len_stride
        """,
        MambaRun=MambaRun,
    )


class MambaSelectiveStateUpdate(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, seqlen, nheads, headdim, dstate, ngroups;
        i32: state_dtype, x_dtype, dt_dtype, A_dtype, BC_dtype, D_dtype, dt_bias_dtype, dt_softplus;
        ptr: state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, dst_state_batch_indices, out, step_states;
        i64: state_rows, state_row_stride, state_head_stride, state_dim_stride, state_dstate_stride, x_batch_stride,
             x_len_stride, x_head_stride, x_dim_stride, dt_batch_stride, dt_len_stride, dt_head_stride, dt_dim_stride,
             A_head_stride, A_dim_stride, A_dstate_stride, B_batch_stride, B_len_stride, B_group_stride,
             B_dstate_stride, C_batch_stride, C_len_stride, C_group_stride, C_dstate_stride, D_head_stride,
             D_dim_stride, z_batch_stride, z_len_stride, z_head_stride, z_dim_stride, dt_bias_head_stride,
             dt_bias_dim_stride, out_batch_stride, out_len_stride, out_head_stride, out_dim_stride,
             step_states_batch_stride, step_states_len_stride, step_states_head_stride, step_states_dim_stride,
             step_states_dstate_stride
        """,
        MambaRun=MambaRun,
    )


class MambaMamba2Step(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, nheads, headdim, ngroups, dstate, state_len;
        i32: width, gate, norm_before_gate, dtype, conv_state_dtype, conv_weight_dtype, conv_bias_dtype, state_dtype,
             dt_bias_dtype, A_log_dtype, D_dtype, norm_weight_dtype;
        f32: dt_min, dt_max, norm_eps;
        i32: reserved;
        ptr: zxBCdt, conv_state, conv_weight, conv_bias, state, dt_bias, A_log, D, norm_weight, out;
        i64: zxBCdt_batch_stride, out_batch_stride, conv_state_batch_stride, conv_state_dim_stride,
             conv_state_len_stride, state_batch_stride, state_head_stride, state_dim_stride, state_dstate_stride,
             D_head_stride, D_dim_stride
        """,
        MambaRun=MambaRun,
    )


class MambaMambaStep(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: batch, dim, dt_rank, dstate, state_len;
        i32: width, dtype, conv_state_dtype, conv_weight_dtype, conv_bias_dtype, state_dtype, dt_bias_dtype,
             A_log_dtype, D_dtype, reserved;
        ptr: xz, conv_state, conv_weight, conv_bias, x_proj_weight, x_proj_scales, dt_proj_weight, dt_bias, state,
             A_log, D, out, workspace;
        i64: xz_batch_stride, out_batch_stride, conv_state_batch_stride, conv_state_dim_stride, conv_state_len_stride,
             state_batch_stride, state_dim_stride, state_dstate_stride
        """,
        MambaRun=MambaRun,
    )


class MambaLinear(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, in_features, out_features;
        i32: dtype, weight_dtype, bias_dtype, norm_weight_dtype, residual_dtype;
        f32: norm_eps;
        ptr: x, weight, scales, bias, norm_weight, residual, residual_out, out;
        i64: x_row_stride, out_row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaDequantize(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, features, weight_rows;
        i32: dtype, index_bytes;
        ptr: weight, scales, indices, out
        """,
        MambaRun=MambaRun,
    )


class MambaGreedyToken(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, vocabulary;
        i32: dtype, eos_count;
        ptr: logits, tokens, eos, ended, sequences, ends, positions, lengths;
        i64: logits_row_stride, sequences_row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaNorm(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, ngroups, group_size;
        i32: is_rms_norm, norm_before_gate, dtype, other_dtype, weight_dtype, bias_dtype;
        f32: eps;
        i32: reserved;
        ptr: x, residual, z, weight, bias, out, residual_out, mean, rstd;
        i64: x_row_stride, residual_row_stride, z_row_stride, out_row_stride, residual_out_row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaNormBackward(Structure):
    _anonymous_ = ("forward",)
    _fields_ = _fields(
        """
        MambaNorm: forward;
        ptr: dout, dresidual_out, dx, dresidual, dz, dweight, dbias, workspace;
        i64: dout_row_stride, dresidual_out_row_stride, dx_row_stride, dresidual_row_stride, dz_row_stride
        """,
        MambaNorm=MambaNorm,
    )


class MambaSwiglu(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, width;
        i32: dtype, gate_last;
        ptr: xy, dout, out, dxy;
        i64: xy_row_stride, dout_row_stride, out_row_stride, dxy_row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaCrossEntropy(Structure):
    _anonymous_ = ("run",)
    _fields_ = _fields(
        """
        MambaRun: run;
        i64: rows, vocabulary, ignore_index;
        i32: dtype, gradient;
        f32: label_smoothing, z_loss;
        ptr: logits, labels, losses;
        i64: logits_row_stride
        """,
        MambaRun=MambaRun,
    )


class MambaLibraryInfo(Structure):
    _fields_ = _fields(
        """
        i32: abi_version, is_cuda, cuda_runtime_version, cuda_driver_version, supports_float16, supports_bfloat16;
        text32: isa
        """,
        text32=c_char * 32,
    )


class MambaKernel(Structure):
    _fields_ = _fields("ptr: op, name, needs, shape; i32: dtypes, threads, shared_bytes, architecture, enabled")


STRUCTS = (
    MambaRun,
    MambaCall,
    MambaSequence,
    MambaSelectiveScan,
    MambaSelectiveScanPlan,
    MambaSelectiveScanBackward,
    MambaSelectiveScanDoubleBackward,
    MambaSsd,
    MambaSsdBackward,
    MambaSsdCarry,
    MambaMamba3,
    MambaMamba3Backward,
    MambaMamba3Step,
    MambaMamba3Inputs,
    MambaMamba3InputsBackward,
    MambaCausalConv1d,
    MambaCausalConv1dBackward,
    MambaCausalConv1dUpdate,
    MambaSelectiveStateUpdate,
    MambaMamba2Step,
    MambaMambaStep,
    MambaLinear,
    MambaDequantize,
    MambaGreedyToken,
    MambaNorm,
    MambaNormBackward,
    MambaSwiglu,
    MambaCrossEntropy,
    MambaLibraryInfo,
    MambaKernel,
)

# {name without mamba_: (the type that it returns, the types that it takes)}
FUNCTIONS = {
    "library_info": (c_int32, [POINTER(MambaLibraryInfo)]),
    "struct_size": (c_int64, [c_char_p]),
    "last_error": (c_char_p, []),
    "kernel_count": (c_int32, []),
    "kernel": (c_int32, [c_int32, POINTER(MambaKernel)]),
    "kernel_launches": (c_int64, [c_int32, c_int32]),
    "kernel_enable": (c_int32, [c_int32, c_int32]),
    "run_sequence": (c_int32, [POINTER(MambaSequence)]),
    "graph_stream": (c_int32, [c_int32, POINTER(c_void_p)]),
    "graph_begin": (c_int32, [c_int32, c_void_p]),
    "graph_end": (c_int32, [c_int32, c_void_p, POINTER(c_void_p)]),
    "graph_launch": (c_int32, [c_int32, c_void_p, c_void_p]),
    "graph_free": (c_int32, [c_void_p]),
    "selective_scan_forward": (c_int32, [POINTER(MambaSelectiveScan)]),
    "selective_scan_backward": (c_int32, [POINTER(MambaSelectiveScanBackward)]),
    "selective_scan_double_backward": (c_int32, [POINTER(MambaSelectiveScanDoubleBackward)]),
    "selective_scan_plan": (c_int32, [POINTER(MambaSelectiveScan), c_int32, POINTER(MambaSelectiveScanPlan)]),
    "selective_scan_forward_carry": (c_int32, [POINTER(MambaSelectiveScan)]),
    "selective_scan_backward_carry": (c_int32, [POINTER(MambaSelectiveScanBackward)]),
    "causal_conv1d_forward": (c_int32, [POINTER(MambaCausalConv1d)]),
    "causal_conv1d_backward": (c_int32, [POINTER(MambaCausalConv1dBackward)]),
    "causal_conv1d_backward_workspace": (c_int64, [POINTER(MambaCausalConv1d)]),
    "causal_conv1d_update": (c_int32, [POINTER(MambaCausalConv1dUpdate)]),
    "selective_state_update": (c_int32, [POINTER(MambaSelectiveStateUpdate)]),
    "mamba2_step": (c_int32, [POINTER(MambaMamba2Step)]),
    "mamba_step": (c_int32, [POINTER(MambaMambaStep)]),
    "mamba_step_workspace": (c_int64, [POINTER(MambaMambaStep)]),
    "linear": (c_int32, [POINTER(MambaLinear)]),
    "dequantize": (c_int32, [POINTER(MambaDequantize)]),
    "greedy_token": (c_int32, [POINTER(MambaGreedyToken)]),
    "ssd_forward": (c_int32, [POINTER(MambaSsd)]),
    "ssd_backward": (c_int32, [POINTER(MambaSsdBackward)]),
    "ssd_forward_workspace": (c_int64, [POINTER(MambaSsd)]),
    "ssd_backward_workspace": (c_int64, [POINTER(MambaSsd)]),
    "ssd_carry": (c_int32, [POINTER(MambaSsdCarry)]),
    "mamba3_forward": (c_int32, [POINTER(MambaMamba3)]),
    "mamba3_backward": (c_int32, [POINTER(MambaMamba3Backward)]),
    "mamba3_step": (c_int32, [POINTER(MambaMamba3Step)]),
    "mamba3_inputs_forward": (c_int32, [POINTER(MambaMamba3Inputs)]),
    "mamba3_inputs_backward": (c_int32, [POINTER(MambaMamba3InputsBackward)]),
    "mamba3_inputs_backward_workspace": (c_int64, [POINTER(MambaMamba3Inputs)]),
    "mamba3_forward_workspace": (c_int64, [POINTER(MambaMamba3)]),
    "mamba3_backward_workspace": (c_int64, [POINTER(MambaMamba3)]),
    "norm_forward": (c_int32, [POINTER(MambaNorm)]),
    "norm_backward": (c_int32, [POINTER(MambaNormBackward)]),
    "norm_backward_workspace": (c_int64, [POINTER(MambaNorm)]),
    "swiglu_forward": (c_int32, [POINTER(MambaSwiglu)]),
    "swiglu_backward": (c_int32, [POINTER(MambaSwiglu)]),
    "cross_entropy": (c_int32, [POINTER(MambaCrossEntropy)]),
}
