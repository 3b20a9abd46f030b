/* Structs of the scans over a sequence: Mamba's, Mamba-2's and Mamba-3's. mamba_kernels.h has the words and letters. */
#ifndef MAMBA_SCANS_H
#define MAMBA_SCANS_H

#include "mamba_types.h"

/* h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t;  out_t = (C_t . h_t + D u_t) silu(z_t);  dt_t = softplus?(delta_t + bias).
 * With reverse the steps are taken from the last one to the first: "before", "t-1" and "last" below count in that order.
 * The last dimension (L) of u, delta, z, out and of variable B and C has stride 1. float32 where the type says float. */
typedef struct MambaSelectiveScan {
    MambaRun run;
    int64_t batch, dim, seqlen, dstate, ngroups;
    int32_t dtype; /* of u, delta, z, out and of variable B, C */
    int32_t delta_softplus;
    int32_t variable_B; /* 0: B is float (D, N) contiguous; 1: (B, G, N, L) of dtype */
    int32_t variable_C;
    const void* u;     /* (B, D, L) */
    const void* delta; /* (B, D, L) */
    const void* z;     /* (B, D, L), optional */
    const float* A;    /* (D, N) */
    const void* B;
    const void* C;
    const float* D;             /* (D), optional */
    const float* delta_bias;    /* (D), optional */
    const float* initial_state; /* (B, D, N), optional */
    const int32_t* seq_idx;     /* (B, L), optional: the state restarts from zero where the value differs from step t-1's */
    void* out;                  /* (B, D, L); forward: required. backward: optional, out is written again */
    float* last_state;          /* (B, D, N), optional; forward only */
    int64_t segments;           /* parts that the length is split into: what mamba_selective_scan_plan said, or 1 */
    float* workspace;           /* forward: (segments, 2, B, D, N), required where segments > 1: what the parts pass on.
                                   backward: MambaSelectiveScanPlan::backward_workspace bytes, required unless these are 0 */
    float* checkpoints;         /* (B, (L-1)/MAMBA_SCAN_CHECKPOINT, D, N): state before step (i+1)*MAMBA_SCAN_CHECKPOINT.
                                   forward: optional, written. backward: required unless it is empty, read */
    int64_t u_batch_stride, u_dim_stride;
    int64_t delta_batch_stride, delta_dim_stride;
    int64_t z_batch_stride, z_dim_stride;
    int64_t B_batch_stride, B_group_stride, B_dstate_stride; /* of a variable B */
    int64_t C_batch_stride, C_group_stride, C_dstate_stride; /* of a variable C */
    int64_t out_batch_stride, out_dim_stride;
    int32_t carried; /* 1: the workspace holds what the parts pass on already, from a carry call with the same segments */
    int32_t reverse; /* 0 or 1 */
    int32_t add; /* 1, with reverse alone: out, and in backward dz too, hold what the other direction gave and are added to */
} MambaSelectiveScan;

/* How to run a problem. */
typedef struct MambaSelectiveScanPlan {
    int64_t forward_segments;   /* for MambaSelectiveScan::segments */
    int64_t backward_segments;  /* the same, for the backward call */
    int64_t slots;              /* for MambaSelectiveScanBackward::slots */
    int64_t backward_workspace; /* bytes of the backward call's workspace */
} MambaSelectiveScanPlan;

/* Gradients, final: nothing is left to add up. Without strides a gradient is contiguous. Nothing is written where the batch or
 * dim is 0. */
typedef struct MambaSelectiveScanBackward {
    MambaSelectiveScan forward; /* as given to the forward call (last_state is not read) */
    const void* dout;           /* (B, D, L) of dtype, last stride 1 */
    int64_t dout_batch_stride, dout_dim_stride;
    const float* dlast_state; /* (B, D, N), optional */
    int64_t slots;            /* what mamba_selective_scan_plan said: parts that variable dB and dC are summed from. With
                                 deterministic 0, CUDA adds into one with atomics */
    void* du;                 /* (B, D, L) of dtype, last stride 1 */
    void* ddelta;             /* (B, D, L) of dtype, last stride 1 */
    void* dz;                 /* (B, D, L) of dtype, last stride 1; required where z is */
    float* dA;                /* (D, N) */
    void* dB;                 /* variable: (B, G, N, L) of dtype, last stride 1. constant: float (D, N) */
    void* dC;                 /* like dB */
    float* dD;                /* (D); required where D is */
    float* ddelta_bias;       /* (D); required where delta_bias is */
    float* dinitial_state;    /* (B, D, N), optional */
    int64_t du_batch_stride, du_dim_stride;
    int64_t ddelta_batch_stride, ddelta_dim_stride;
    int64_t dz_batch_stride, dz_dim_stride;
    int64_t dB_batch_stride, dB_group_stride, dB_dstate_stride; /* of a variable B; contiguous where float32 and B is 1 */
    int64_t dC_batch_stride, dC_group_stride, dC_dstate_stride; /* of a variable C; the same */
} MambaSelectiveScanBackward;

/* The scan's second derivative: the tangents of its results and gradients, from those of its inputs and of dout. All float32
 * and contiguous, shapes as above. Nothing is written where the batch or dim is 0. */
typedef struct MambaSelectiveScanDoubleBackward {
    MambaSelectiveScan
        forward; /* variable B and C; no softplus, bias, D, z, workspace, checkpoints or last_state. out: required */
    const float* dout;
    const float* dlast_state; /* optional */
    const float* u_tangent;
    const float* delta_tangent;
    const float* A_tangent;
    const float* B_tangent;
    const float* C_tangent;
    const float* initial_state_tangent; /* optional */
    const float* dout_tangent;
    int64_t slots; /* what mamba_selective_scan_plan said */
    float* ddelta; /* no tangent: the gradient itself */
    float* out_tangent;
    float* last_state_tangent;
    float* du_tangent;
    float* ddelta_tangent;
    float* dA_tangent; /* (B, D, N): to be summed over B */
    float* dB_tangent; /* (slots, B, G, N, L), zeros before the call: to be summed over slots */
    float* dC_tangent; /* like dB_tangent */
    float* dinitial_state_tangent;
} MambaSelectiveScanDoubleBackward;

/* Mamba-2's scan (state space duality): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t);
 * dt_t = clamp(softplus?(dt_t + dt_bias), dt_min, dt_max). H / G neighbouring heads share a group of B and C.
 * The last dimension (P or N) of x, z, out, B and C has stride 1. float32 where the type says float. */
typedef struct MambaSsd {
    MambaRun run;
    int64_t batch, seqlen, nheads, headdim, ngroups, dstate;
    int32_t dtype; /* of x, z, B, C, out */
    int32_t dt_dtype, A_dtype, dt_bias_dtype;
    int32_t A_is_log; /* A holds log(-A), as layers do; backward: dA is its gradient */
    int32_t dt_softplus;
    float dt_min, dt_max;       /* 0 and infinity: dt is not clamped above */
    const void* x;              /* (B, L, H, P) */
    const void* dt;             /* (B, L, H) of dt_dtype */
    const void* A;              /* (H) of A_dtype */
    const void* B;              /* (B, L, G, N) */
    const void* C;              /* (B, L, G, N) */
    const float* D;             /* (H, P), optional; D_dim_stride 0 for one value a head */
    const void* z;              /* (B, L, H, P), optional; not in backward */
    const void* dt_bias;        /* (H) of dt_bias_dtype, optional */
    const float* initial_state; /* (B, H, P, N), optional */
    const int32_t* seq_idx;     /* (B, L), optional: the state restarts from zero where the value differs from step t-1's */
    const int32_t* cu_seqlens;  /* (B + 1), optional, forward only: entry b of the batch is steps cu_seqlens[b] to
                                   cu_seqlens[b+1] of the one row that x, dt, B, C, z, out then have; seqlen is that row's
                                   length, and what lies beyond it is not touched */
    void* out;                  /* (B, L, H, P), optional: without it only final_state is computed. Not read in backward */
    float* final_state;         /* (B, H, P, N), optional; forward only */
    void* workspace;            /* as many bytes as the _workspace function says, 16-byte aligned; NULL for 0 */
    int64_t x_batch_stride, x_len_stride, x_head_stride;
    int64_t dt_batch_stride, dt_len_stride, dt_head_stride;
    int64_t B_batch_stride, B_len_stride, B_group_stride;
    int64_t C_batch_stride, C_len_stride, C_group_stride;
    int64_t D_head_stride, D_dim_stride;
    int64_t z_batch_stride, z_len_stride, z_head_stride;
    int64_t out_batch_stride, out_len_stride, out_head_stride;
} MambaSsd;

/* Gradients, final: nothing is left to add up, and no result depends on the order of atomics. */
typedef struct MambaSsdBackward {
    MambaSsd forward;          /* as given to the forward call; z and cu_seqlens must be NULL */
    const void* dout;          /* (B, L, H, P) of dtype, last stride 1 */
    const float* dfinal_state; /* (B, H, P, N), optional */
    void* dx;                  /* (B, L, H, P) of dtype, last stride 1 */
    void* ddt;                 /* (B, L, H) of dt_dtype */
    float* dA;                 /* (H) */
    void* dB;                  /* (B, L, G, N) of dtype, last stride 1 */
    void* dC;                  /* (B, L, G, N) of dtype, last stride 1 */
    float* dD;                 /* (H, P), or (H) where D_dim_stride is 0; required where D is */
    float* ddt_bias;           /* (H); required where dt_bias is */
    float* dinitial_state;     /* (B, H, P, N), optional */
    int64_t dout_batch_stride, dout_len_stride, dout_head_stride;
    int64_t dx_batch_stride, dx_len_stride, dx_head_stride;
    int64_t ddt_batch_stride, ddt_len_stride, ddt_head_stride;
    int64_t dB_batch_stride, dB_len_stride, dB_group_stride;
    int64_t dC_batch_stride, dC_len_stride, dC_group_stride;
} MambaSsdBackward;

/* Mamba-2's scan in pieces that follow one another, as parts of a length or on devices: the state before each piece,
 *   before_0 = initial;  before_(k+1) = factor_k before_k + passed_k
 * from the state that each ends with if it starts from zero. reverse: from the last piece on to the first, as gradients go.
 * Letters: K pieces. */
typedef struct MambaSsdCarry {
    MambaRun run;
    int64_t batch, pieces, nheads, state_size; /* state_size: P N */
    int32_t reverse;
    int32_t reserved;
    const float* passed;  /* (B, K, H, P N), contiguous in a piece */
    const float* factors; /* (B, K, H) */
    const float* initial; /* (B, H, P N), optional: zero */
    float* before;        /* (B, K, H, P N), optional */
    float* last;          /* (B, H, P N), optional: behind all pieces */
    float* product;       /* (B, H), optional: of the factors */
    int64_t passed_batch_stride, passed_piece_stride;
    int64_t factors_batch_stride, factors_piece_stride, factors_head_stride;
} MambaSsdCarry;

/* Mamba-3's scan. A step of a head, with lambda = sigmoid(trap) and the state before it (angle, h, k, v):
 *   angle = (angle + pi tanh(angles) dt) mod 2 pi;  q_r = turn(q_r + q_bias_r, angle);  k'_r = turn(k_r + k_bias_r, angle)
 *   h = exp(adt) (h + (1 - lambda) dt sum_r (mimo_v_r v) k_r^T) + lambda dt sum_r (mimo_v_r v') k'_r^T
 *   y_r = h q_r + D mimo_v_r v';  y_r = y_r / sqrt(mean(y_r^2) + norm_eps) norm_weight, if that is given
 *   out = sum_r mimo_out_r y_r silu(mimo_z_r z)
 * turn changes the pair (a, b) to (a cos - b sin, a sin + b cos): entries 2i and 2i + 1 (pairwise), or i and i + N / 2, of
 * angle i. mimo_* that are NULL count as 1; without mimo_out out has all rows. H / G neighbouring heads share a group of q and
 * k. The last dimension of q, k, v, z, angles and out has stride 1. float32 where the type says float. Letters: R rank, S
 * angles, U sequences. */
typedef struct MambaMamba3 {
    MambaRun run;
    int64_t batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles;
    int32_t dtype; /* of q, k, v, z, out */
    int32_t adt_dtype, dt_dtype, trap_dtype, angle_dtype;
    int32_t pairwise;
    int32_t angles_of_heads; /* 0: angles are (B, L, S), for all heads */
    float norm_eps;
    const void* q;             /* (B, L, R, G, N) */
    const void* k;             /* (B, L, R, G, N) */
    const void* v;             /* (B, L, H, P) */
    const void* adt;           /* (B, L, H) of adt_dtype */
    const void* dt;            /* (B, L, H) of dt_dtype */
    const void* trap;          /* (B, L, H) of trap_dtype */
    const float* q_bias;       /* (H, R, N) */
    const float* k_bias;       /* (H, R, N) */
    const void* angles;        /* (B, L, H, S) of angle_dtype, or (B, L, S) */
    const float* D;            /* (H), optional */
    const void* z;             /* (B, L, H, P), optional */
    const float* mimo_v;       /* (H, R, P), optional */
    const float* mimo_z;       /* (H, R, P), optional */
    const float* mimo_out;     /* (H, R, P), optional */
    const float* norm_weight;  /* (H, P), optional */
    const float* angle_state;  /* (U, H, S), the state before the first step; all four or none */
    const float* ssm_state;    /* (U, H, P, N) */
    const float* k_state;      /* (U, R, H, N) */
    const float* v_state;      /* (U, H, P) */
    const int32_t* seq_idx;    /* (B, L), optional: the states restart from zero where the value differs from step t-1's */
    const int32_t* cu_seqlens; /* (U + 1), optional: sequence u is steps cu_seqlens[u] to cu_seqlens[u+1] of the one row; what
                                  lies behind the last is not touched. Not together with seq_idx */
    int64_t sequences;         /* U: batch, or what cu_seqlens bounds */
    void* out;                 /* (B, L, H, P), without mimo_out (B, L, R, H, P). Not in backward */
    float* final_angle;        /* (U, H, S), optional, not in backward; nor the other three */
    float* final_ssm;          /* (U, H, P, N) */
    float* final_k;            /* (U, R, H, N) */
    float* final_v;            /* (U, H, P) */
    void* workspace;           /* as many bytes as the _workspace function says, 16-byte aligned; NULL for 0 */
    int64_t q_batch_stride, q_len_stride, q_rank_stride, q_group_stride;
    int64_t k_batch_stride, k_len_stride, k_rank_stride, k_group_stride;
    int64_t v_batch_stride, v_len_stride, v_head_stride;
    int64_t adt_batch_stride, adt_len_stride, adt_head_stride;
    int64_t dt_batch_stride, dt_len_stride, dt_head_stride;
    int64_t trap_batch_stride, trap_len_stride, trap_head_stride;
    int64_t angle_batch_stride, angle_len_stride, angle_head_stride;
    int64_t z_batch_stride, z_len_stride, z_head_stride;
    int64_t out_batch_stride, out_len_stride, out_rank_stride, out_head_stride;
} MambaMamba3;

/* Gradients, final, of the shape and dtype of what they are the gradients of; no result depends on the number of threads or the
 * order of atomics. They are contiguous, but for the steps of dv, dz, dtrap and dangles, which may be parts of one tensor. */
typedef struct MambaMamba3Backward {
    MambaMamba3 forward;       /* as given to the forward call; out and final_* are not read */
    const void* dout;          /* of out's shape, last stride 1 */
    const float* dfinal_angle; /* optional, and so are the other three */
    const float* dfinal_ssm;
    const float* dfinal_k;
    const float* dfinal_v;
    void *dq, *dk, *dv, *dadt, *ddt, *dtrap;
    float *dq_bias, *dk_bias;
    void* dangles;
    float* dD; /* required where D is; dz to dnorm_weight the same */
    void* dz;
    float *dmimo_v, *dmimo_z, *dmimo_out, *dnorm_weight;
    float *dangle_state, *dssm_state, *dk_state, *dv_state; /* required where the states are */
    int64_t dout_batch_stride, dout_len_stride, dout_rank_stride, dout_head_stride;
    int64_t dv_step_stride, dz_step_stride, dtrap_step_stride, dangle_step_stride; /* of B L steps, one row after the other */
} MambaMamba3Backward;

/* One decoding step, seqlen 1: as the scan, with states of any dtype that are updated in place, contiguous. The output uses the
 * new state before it is rounded. The scan's parameters may have other dtypes here.
 *
 * With dt_bias, q_weight and k_weight, all three or none, a layer's projection is taken as it is: q and k before their norm,
 * rms(x) = x / sqrt(mean(x^2) + eps) * weight, dt before its bias and softplus, and as adt the projection a of
 * A = -max(f(a), A_floor), where f(a) is 1 + a from 0 on and 1 / (1 - a) below, or with A_softplus log(1 + e^a). */
typedef struct MambaMamba3Step {
    MambaMamba3 scan; /* without states, packing and workspace, which are not read */
    int32_t ssm_dtype, k_dtype, v_dtype;
    int32_t parameter_dtype; /* of q_bias, k_bias, D, mimo_v, mimo_z, mimo_out, dt_bias */
    int32_t weight_dtype;    /* of norm_weight, q_weight, k_weight */
    int32_t A_softplus;
    float A_floor, q_eps, k_eps;
    int32_t reserved;
    const void* dt_bias;  /* (H) */
    const void* q_weight; /* (N), for all ranks and groups */
    const void* k_weight; /* (N) */
    float* state_angle;   /* (B, H, S) */
    void* state_ssm;      /* (B, H, P, N) of ssm_dtype */
    void* state_k;        /* (B, R, H, N) of k_dtype */
    void* state_v;        /* (B, H, P) of v_dtype */
} MambaMamba3Step;

/* What Mamba-3's scan takes, of a layer's projection, of which a row is a step: of each row of q and k
 * rms(x) = x / sqrt(mean(x^2) + eps) * weight; dt = log(1 + e^(dt + dt_bias)), and adt = A dt with A as for MambaMamba3Step. */
typedef struct MambaMamba3Inputs {
    MambaRun run;
    int64_t rows, matrices, dstate, nheads; /* matrices: R G */
    int32_t dtype;                          /* of q, k, dt, a, q_out, k_out */
    int32_t q_weight_dtype, k_weight_dtype;
    int32_t A_softplus;
    float A_floor, q_eps, k_eps;
    int32_t reserved;
    const void* q;        /* (rows, R G, N) */
    const void* k;        /* (rows, R G, N) */
    const void* dt;       /* (rows, H) */
    const void* a;        /* (rows, H) */
    const void* q_weight; /* (N) of q_weight_dtype */
    const void* k_weight; /* (N) of k_weight_dtype */
    const float* dt_bias; /* (H) */
    void* q_out;          /* (rows, R G, N), contiguous, and so are the other three */
    void* k_out;
    float* dt_out; /* (rows, H) */
    float* adt_out;
    int64_t row_stride; /* of q, k, dt and a */
} MambaMamba3Inputs;

/* Gradients, final; no result depends on the number of threads or the order of atomics. */
typedef struct MambaMamba3InputsBackward {
    MambaMamba3Inputs forward; /* as given to the forward call; q_out to adt_out are not read */
    const void* dq_out;        /* contiguous, and so are the other three */
    const void* dk_out;
    const float* ddt_out;
    const float* dadt_out;
    void *dq, *dk, *ddt, *da; /* of dtype */
    void* dq_weight;          /* (N) of q_weight_dtype */
    void* dk_weight;
    float* ddt_bias;     /* (H) */
    void* workspace;     /* as many bytes as mamba_mamba3_inputs_backward_workspace says; NULL for 0 */
    int64_t drow_stride; /* of dq, dk, ddt and da */
} MambaMamba3InputsBackward;

#endif /* MAMBA_SCANS_H */
