/* The C ABI: the only contract between Python (src/mamba_ssm/_native) and the two kernel libraries.
 *
 * mamba_cpu and mamba_cuda export the same functions. Every tensor is a pointer with strides in elements; a stride that
 * is not listed is that of a contiguous tensor. Optional pointers may be NULL. Every function that returns int32_t returns
 * MAMBA_OK or an error code, and mamba_last_error() then says what went wrong, on the calling thread.
 * Nothing here allocates device memory, synchronises, prints or throws, so all of it works under CUDA-graph capture.
 *
 * Letters: B batch, D channels, L length, N dstate, G groups, H heads, P headdim, W conv width.
 * Change a struct or a function: raise MAMBA_ABI_VERSION and mirror it in src/mamba_ssm/_native/abi.py.
 */
#ifndef MAMBA_KERNELS_H
#define MAMBA_KERNELS_H

#include <stdint.h>

#if defined(_WIN32) && defined(MAMBA_BUILD_LIBRARY)
#define MAMBA_API __declspec(dllexport)
#elif defined(_WIN32)
#define MAMBA_API __declspec(dllimport)
#else
#define MAMBA_API __attribute__((visibility("default"))) /* NOLINT(msvc): the branch for other compilers */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MAMBA_ABI_VERSION 10

/* Error codes. */
#define MAMBA_OK 0
#define MAMBA_ERROR_INVALID 1         /* an argument is wrong: message names it */
#define MAMBA_ERROR_UNSUPPORTED 2     /* right, but not in this library (size limit) */
#define MAMBA_ERROR_DTYPE_DISABLED 3  /* the dtype was switched off when the library was built */
#define MAMBA_ERROR_CUDA 4            /* CUDA said no: message holds the error's name, the kernel and the sizes */
#define MAMBA_ERROR_NO_KERNEL_IMAGE 5 /* the library holds no code for this GPU's architecture */
#define MAMBA_ERROR_DRIVER 6          /* no driver, or one older than the library's CUDA runtime needs */
#define MAMBA_ERROR_MEMORY 7          /* host memory could not be allocated (CPU library) */

/* Element types. */
#define MAMBA_FLOAT32 0
#define MAMBA_FLOAT16 1
#define MAMBA_BFLOAT16 2

/* The forward scan stores the state every so many steps for the backward scan to start from. */
#define MAMBA_SCAN_CHECKPOINT 64
/* Largest dstate of selective_scan, selective_state_update, ssd and mamba3. */
#define MAMBA_MAX_DSTATE 256
/* Largest headdim of ssd and mamba3. */
#define MAMBA_MAX_HEADDIM 256
/* Largest rank of mamba3. */
#define MAMBA_MAX_RANK 64
/* Largest dt_rank of mamba_step. */
#define MAMBA_MAX_DT_RANK 8192
/* Largest group_size of norm. */
#define MAMBA_MAX_NORM_GROUP 1073741824

/* Where to run. mamba_cuda reads stream and device, mamba_cpu reads num_threads. */
typedef struct MambaRun {
    void* stream;        /* cudaStream_t; NULL is the legacy default stream */
    int32_t device;      /* CUDA device index */
    int32_t num_threads; /* most CPU threads to use, >= 1 */
} MambaRun;

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

/* out_{d,l} = silu?(bias_d + sum_w weight_{d,w} x_{d, l-(W-1)+w}): causal depthwise convolution. x and out have either
 * stride_l == 1 or stride_d == 1. With seq_idx, taps that lie in another sequence count as zero; where it is negative, x is
 * padding and out 0. */
typedef struct MambaCausalConv1d {
    MambaRun run;
    int64_t batch, dim, seqlen;
    int32_t width;        /* 2, 3 or 4 */
    int32_t silu;         /* 0 or 1 */
    int32_t dtype;        /* of x, initial_states, final_states, out */
    int32_t weight_dtype; /* of weight */
    int32_t bias_dtype;   /* of bias */
    int32_t reserved;
    const void* x;              /* (B, D, L) */
    const void* weight;         /* (D, W) contiguous */
    const void* bias;           /* (D), optional */
    const int32_t* seq_idx;     /* (B, L), optional; not together with initial_states or final_states */
    const void* initial_states; /* (B, D, W-1), optional: the inputs before step 0 */
    void* out;                  /* (B, D, L) */
    void* final_states;         /* (B, D, W-1), optional; forward only: the last W-1 inputs */
    int64_t x_batch_stride, x_dim_stride, x_len_stride;
    int64_t out_batch_stride, out_dim_stride, out_len_stride;
    int64_t initial_batch_stride, initial_dim_stride, initial_len_stride;
    int64_t final_batch_stride, final_dim_stride, final_len_stride;
} MambaCausalConv1d;

/* Gradients, final: nothing is left to add up, and no result depends on the order of atomics. */
typedef struct MambaCausalConv1dBackward {
    MambaCausalConv1d forward; /* as given to the forward call (out and final_states are not read) */
    const void* dout;          /* (B, D, L), stride_l == 1 or stride_d == 1 */
    void* dx;                  /* (B, D, L), same */
    int64_t dout_batch_stride, dout_dim_stride, dout_len_stride;
    int64_t dx_batch_stride, dx_dim_stride, dx_len_stride;
    const void* dfinal_states; /* (B, D, W-1), contiguous, of dtype, optional */
    void* dinitial_states;     /* (B, D, W-1), contiguous, of dtype; optional */
    void* workspace;           /* as many bytes as mamba_causal_conv1d_backward_workspace says; NULL for 0 */
    void* dweight;             /* (D, W) of weight_dtype */
    void* dbias;               /* (D) of bias_dtype; required where bias is */
} MambaCausalConv1dBackward;

/* Decoding: seqlen new inputs, with the last inputs in conv_state, which is updated in place. Without cache_seqlens the
 * state holds the newest input last (shifted); with it the state is a circular buffer written from cache_seqlens[b] % S. */
typedef struct MambaCausalConv1dUpdate {
    MambaRun run;
    int64_t batch, dim, seqlen, state_len; /* state_len S >= W-1 */
    int32_t width, silu;
    int32_t dtype; /* of x, out */
    int32_t state_dtype, weight_dtype, bias_dtype;
    const void* x;                     /* (B, D, L) */
    void* conv_state;                  /* (rows, D, S) */
    const void* weight;                /* (D, W) contiguous */
    const void* bias;                  /* (D), optional */
    const int32_t* cache_seqlens;      /* (B), optional */
    const int32_t* conv_state_indices; /* (B), optional: row of conv_state; a negative row is padding: out is zero */
    void* out;                         /* (B, D, L) */
    int64_t state_rows;
    int64_t x_batch_stride, x_dim_stride, x_len_stride;
    int64_t state_row_stride, state_dim_stride, state_len_stride;
    int64_t out_batch_stride, out_dim_stride, out_len_stride;
} MambaCausalConv1dUpdate;

/* Decode steps, T of them: state = exp(dt A) state + dt B x, in place or into another row; out = (C . state + D x) silu(z). Any
 * stride may be 0. Between steps the state is not rounded to its dtype. */
typedef struct MambaSelectiveStateUpdate {
    MambaRun run;
    int64_t batch, seqlen, nheads, headdim, dstate, ngroups; /* seqlen: T, at least 1 */
    int32_t state_dtype;
    int32_t x_dtype; /* of x, z, out */
    int32_t dt_dtype;
    int32_t A_dtype;
    int32_t BC_dtype;
    int32_t D_dtype;
    int32_t dt_bias_dtype;
    int32_t dt_softplus;
    void* state;                        /* (rows, H, P, N) */
    const void* x;                      /* (B, T, H, P) */
    const void* dt;                     /* (B, T, H, P) */
    const void* A;                      /* (H, P, N) */
    const void* B;                      /* (B, T, G, N) */
    const void* C;                      /* (B, T, G, N) */
    const void* D;                      /* (H, P), optional */
    const void* z;                      /* (B, T, H, P), optional */
    const void* dt_bias;                /* (H, P), optional */
    const int32_t* state_batch_indices; /* (B), optional: row of state; a negative row is padding: out is zero, nothing else is
                                           written */
    const int32_t* dst_state_batch_indices; /* (B), optional: the row that takes the new state, in place of the row that was
                                               read; a negative row takes none. A row that is written here and read or
                                               written elsewhere in the call is a race on CUDA */
    void* out;                              /* (B, T, H, P) */
    void* step_states;                      /* (B, T, H, P, N) of state_dtype, optional: the state after each step */
    int64_t state_rows;
    int64_t state_row_stride, state_head_stride, state_dim_stride, state_dstate_stride;
    int64_t x_batch_stride, x_len_stride, x_head_stride, x_dim_stride;
    int64_t dt_batch_stride, dt_len_stride, dt_head_stride, dt_dim_stride;
    int64_t A_head_stride, A_dim_stride, A_dstate_stride;
    int64_t B_batch_stride, B_len_stride, B_group_stride, B_dstate_stride;
    int64_t C_batch_stride, C_len_stride, C_group_stride, C_dstate_stride;
    int64_t D_head_stride, D_dim_stride;
    int64_t z_batch_stride, z_len_stride, z_head_stride, z_dim_stride;
    int64_t dt_bias_head_stride, dt_bias_dim_stride;
    int64_t out_batch_stride, out_len_stride, out_head_stride, out_dim_stride;
    int64_t step_states_batch_stride, step_states_len_stride, step_states_head_stride, step_states_dim_stride;
    int64_t step_states_dstate_stride;
} MambaSelectiveStateUpdate;

/* One decode step of a Mamba-2 layer between its two projections, on the output of the first: a row of zxBCdt holds z and x (H,
 * P), B and C (G, N) and dt (H). x, B and C go through the causal convolution and silu, with the last inputs in conv_state;
 * then state = exp(dt A) state + dt B x with dt = clamp(softplus(dt + dt_bias), dt_min, dt_max) and A = -exp(A_log), and out =
 * C . state + D x: times silu(z), or with norm_weight in a gated RMSNorm over each group's H P / G channels (as MambaNorm).
 * Both states are updated in place. Elements of a row of zxBCdt and of out have stride 1. Letters: I = H P + 2 G N, R rows. */
typedef struct MambaMamba2Step {
    MambaRun run;
    int64_t batch, nheads, headdim, ngroups, dstate;
    int64_t state_len; /* of conv_state, >= width - 1 */
    int32_t width;     /* 2, 3 or 4 */
    int32_t gate;      /* without norm_weight: whether out is multiplied by silu(z) */
    int32_t norm_before_gate;
    int32_t dtype; /* of zxBCdt, out */
    int32_t conv_state_dtype, conv_weight_dtype, conv_bias_dtype;
    int32_t state_dtype, dt_bias_dtype, A_log_dtype, D_dtype, norm_weight_dtype;
    float dt_min, dt_max, norm_eps;
    int32_t reserved;
    const void* zxBCdt;      /* (B, 2 H P + 2 G N + H) */
    void* conv_state;        /* (B, I, S) */
    const void* conv_weight; /* (I, W) contiguous */
    const void* conv_bias;   /* (I), optional */
    void* state;             /* (B, H, P, N) */
    const void* dt_bias;     /* (H) contiguous */
    const void* A_log;       /* (H) contiguous */
    const void* D;           /* (H, P); D_dim_stride 0 for one value a head */
    const void* norm_weight; /* (H P) contiguous, optional */
    void* out;               /* (B, H P) */
    int64_t zxBCdt_batch_stride, out_batch_stride;
    int64_t conv_state_batch_stride, conv_state_dim_stride, conv_state_len_stride;
    int64_t state_batch_stride, state_head_stride, state_dim_stride, state_dstate_stride;
    int64_t D_head_stride, D_dim_stride;
} MambaMamba2Step;

/* One decode step of a Mamba layer between its two outer projections, on the output of the first: a row of xz holds x and z
 * (D). x goes through the causal convolution and silu, with the last inputs in conv_state; x_proj_weight x is dt's rank R, B
 * and C (N each); dt = softplus(dt_proj_weight dt + dt_bias); state = exp(dt A) state + dt B x with A = -exp(A_log), and out =
 * (C . state + D x) silu(z). Both states are updated in place. Elements of a row of xz and of out have stride 1. */
typedef struct MambaMambaStep {
    MambaRun run;
    int64_t batch, dim, dt_rank, dstate;
    int64_t state_len; /* of conv_state, >= width - 1 */
    int32_t width;     /* 2, 3 or 4 */
    int32_t dtype;     /* of xz, x_proj_weight, dt_proj_weight, out */
    int32_t conv_state_dtype, conv_weight_dtype, conv_bias_dtype;
    int32_t state_dtype, dt_bias_dtype, A_log_dtype, D_dtype;
    int32_t reserved;
    const void* xz;             /* (B, 2 D) */
    void* conv_state;           /* (B, D, S) */
    const void* conv_weight;    /* (D, W) contiguous */
    const void* conv_bias;      /* (D), optional */
    const void* x_proj_weight;  /* (R + 2 N, D) contiguous */
    const void* dt_proj_weight; /* (D, R) contiguous */
    const void* dt_bias;        /* (D) contiguous, optional */
    void* state;                /* (B, D, N) */
    const void* A_log;          /* (D, N) contiguous */
    const void* D;              /* (D) contiguous */
    void* out;                  /* (B, D) */
    void* workspace;            /* as many bytes as mamba_mamba_step_workspace says, 16-byte aligned */
    int64_t xz_batch_stride, out_batch_stride;
    int64_t conv_state_batch_stride, conv_state_dim_stride, conv_state_len_stride;
    int64_t state_batch_stride, state_dim_stride, state_dstate_stride;
} MambaMambaStep;

/* out = x weight^T + bias, for few rows: weight is read once for 8 of them. Elements of a row of x and of out have stride 1. */
typedef struct MambaLinear {
    MambaRun run;
    int64_t rows, in_features, out_features;
    int32_t dtype; /* of x, weight, out */
    int32_t bias_dtype;
    const void* x;      /* (R, in) */
    const void* weight; /* (out, in) contiguous */
    const void* bias;   /* (out) contiguous, optional */
    void* out;          /* (R, out) */
    int64_t x_row_stride, out_row_stride;
} MambaLinear;

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

/* Gradients, final and contiguous, of the shape and dtype of what they are the gradients of; no result depends on the number of
 * threads or the order of atomics. */
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
} MambaMamba3Backward;

/* One decoding step, seqlen 1: as the scan, with states of any dtype that are updated in place, contiguous. The output uses the
 * new state before it is rounded. */
typedef struct MambaMamba3Step {
    MambaMamba3 scan; /* without states, packing and workspace, which are not read */
    int32_t ssm_dtype, k_dtype, v_dtype;
    int32_t reserved;
    float* state_angle; /* (B, H, S) */
    void* state_ssm;    /* (B, H, P, N) of ssm_dtype */
    void* state_k;      /* (B, R, H, N) of k_dtype */
    void* state_v;      /* (B, H, P) of v_dtype */
} MambaMamba3Step;

/* out = (s - mean(s)) rstd weight + bias over each of a row's ngroups groups of neighbours, rstd = 1 / sqrt(var(s) + eps).
 * s = x + residual, rounded to other_dtype; or, with z, s = x silu(z) (norm_before_gate 0), or s = x and out is multiplied by
 * silu(z) (norm_before_gate 1). is_rms_norm: no mean, rstd = 1 / sqrt(mean(s^2) + eps). The elements of a row have stride 1.
 * Letters: R rows, N = ngroups * group_size. */
typedef struct MambaNorm {
    MambaRun run;
    int64_t rows, ngroups, group_size; /* group_size <= MAMBA_MAX_NORM_GROUP */
    int32_t is_rms_norm, norm_before_gate;
    int32_t dtype;       /* of x, out */
    int32_t other_dtype; /* of residual, residual_out, z and their gradients: dtype or float32 */
    int32_t weight_dtype, bias_dtype;
    float eps;
    int32_t reserved;
    const void* x;        /* (R, N); backward: not read where residual_out is */
    const void* residual; /* (R, N), optional, not together with z; not read in backward */
    const void* z;        /* (R, N), optional */
    const void* weight;   /* (N) */
    const void* bias;     /* (N), optional */
    void* out;            /* (R, N); not in backward */
    void* residual_out;   /* (R, N), optional, not together with z: s; backward: read */
    float* mean;          /* (R, ngroups), optional: for backward, which reads it unless is_rms_norm */
    float* rstd;          /* (R, ngroups), optional: for backward, which reads it */
    int64_t x_row_stride, residual_row_stride, z_row_stride, out_row_stride, residual_out_row_stride;
} MambaNorm;

/* Gradients, final: nothing is left to add up, and no result depends on the order of atomics. */
typedef struct MambaNormBackward {
    MambaNorm forward;
    const void* dout;          /* (R, N) of dtype */
    const void* dresidual_out; /* (R, N) of other_dtype, optional, not together with z */
    void* dx;                  /* (R, N) of dtype */
    void* dresidual;           /* (R, N) of other_dtype, optional, not together with z: dx once more */
    void* dz;                  /* (R, N) of other_dtype; required where z is */
    void* dweight;             /* (N) of weight_dtype */
    void* dbias;               /* (N) of bias_dtype; required where bias is */
    void* workspace;           /* as many bytes as mamba_norm_backward_workspace says, 16-byte aligned; NULL for 0 */
    int64_t dout_row_stride, dresidual_out_row_stride, dx_row_stride, dresidual_row_stride, dz_row_stride;
} MambaNormBackward;

/* out = silu(x) y of the halves x, y of each row of xy; in backward dxy, and out once more. Elements of a row have stride 1. */
typedef struct MambaSwiglu {
    MambaRun run;
    int64_t rows, width; /* width of a half */
    int32_t dtype;       /* of all */
    int32_t reserved;
    const void* xy;   /* (R, 2 width) */
    const void* dout; /* (R, width), backward only */
    void* out;        /* (R, width); backward: optional */
    void* dxy;        /* (R, 2 width), backward only */
    int64_t xy_row_stride, dout_row_stride, out_row_stride, dxy_row_stride;
} MambaSwiglu;

/* What the library is and where it runs. */
typedef struct MambaLibraryInfo {
    int32_t abi_version;
    int32_t is_cuda;              /* 0: mamba_cpu, 1: mamba_cuda */
    int32_t cuda_runtime_version; /* e.g. 13000; 0 in mamba_cpu */
    int32_t cuda_driver_version;  /* newest CUDA the installed driver supports; 0 without a driver and in mamba_cpu */
    int32_t supports_float16;
    int32_t supports_bfloat16;
    char isa[32]; /* mamba_cpu: the instruction set chosen at run time, "avx512", "avx2" or "generic"; mamba_cuda: "cuda" */
} MambaLibraryInfo;

MAMBA_API int32_t mamba_library_info(MambaLibraryInfo* info);
/* sizeof of a params struct by its name, 0 for a name that is not known: the loader compares it with its mirror. */
MAMBA_API int64_t mamba_struct_size(const char* name);
/* The calling thread's last error, in words; "" before any. Valid until the thread's next failing call. */
MAMBA_API const char* mamba_last_error(void);

MAMBA_API int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params);
MAMBA_API int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params);
/* Fills plan from params as for the forward call, but for segments, workspace, last_state and checkpoints: alignment counts
 * too. deterministic 1: as many slots as it takes to need no atomics. */
MAMBA_API int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t deterministic,
                                            MambaSelectiveScanPlan* plan);
/* What comes first where the length (of at least one step) lies on several devices: fill the workspace, also of one segment,
 * and nothing else. For each segment its end state from zero and the product of its decays, below 0 for a restart. Backward:
 * the gradient of the state before the segment, if none came from later ones, in place of the end state. segments: the plan's
 * backward_segments, for both. The main call with `carried` goes on from there. */
MAMBA_API int32_t mamba_selective_scan_forward_carry(const MambaSelectiveScan* params);
MAMBA_API int32_t mamba_selective_scan_backward_carry(const MambaSelectiveScanBackward* params);

MAMBA_API int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params);
MAMBA_API int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params);
/* Bytes of MambaCausalConv1dBackward::workspace; reads run, the sizes, the strides of x and whether bias is NULL. */
MAMBA_API int64_t mamba_causal_conv1d_backward_workspace(const MambaCausalConv1d* params);
MAMBA_API int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params);

MAMBA_API int32_t mamba_selective_state_update(const MambaSelectiveStateUpdate* params);

MAMBA_API int32_t mamba_mamba2_step(const MambaMamba2Step* params);
MAMBA_API int32_t mamba_mamba_step(const MambaMambaStep* params);
/* Bytes of MambaMambaStep::workspace; reads run and the sizes. */
MAMBA_API int64_t mamba_mamba_step_workspace(const MambaMambaStep* params);

MAMBA_API int32_t mamba_linear(const MambaLinear* params);

MAMBA_API int32_t mamba_ssd_forward(const MambaSsd* params);
MAMBA_API int32_t mamba_ssd_backward(const MambaSsdBackward* params);
/* Bytes of MambaSsd::workspace; reads all but dt and the workspace itself: ask with what the call will be given. */
MAMBA_API int64_t mamba_ssd_forward_workspace(const MambaSsd* params);
MAMBA_API int64_t mamba_ssd_backward_workspace(const MambaSsd* params);

MAMBA_API int32_t mamba_mamba3_forward(const MambaMamba3* params);
MAMBA_API int32_t mamba_mamba3_backward(const MambaMamba3Backward* params);
MAMBA_API int32_t mamba_mamba3_step(const MambaMamba3Step* params);
/* Bytes of MambaMamba3::workspace in each direction; they read run, sizes, dtype, and optional pointers for NULL. */
MAMBA_API int64_t mamba_mamba3_forward_workspace(const MambaMamba3* params);
MAMBA_API int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params);

MAMBA_API int32_t mamba_norm_forward(const MambaNorm* params);
MAMBA_API int32_t mamba_norm_backward(const MambaNormBackward* params);
/* Bytes of MambaNormBackward::workspace; reads run, the sizes, dtype, other_dtype and whether bias is NULL. */
MAMBA_API int64_t mamba_norm_backward_workspace(const MambaNorm* params);
MAMBA_API int32_t mamba_swiglu_forward(const MambaSwiglu* params);
MAMBA_API int32_t mamba_swiglu_backward(const MambaSwiglu* params);

#ifdef __cplusplus
}
#endif

#endif /* MAMBA_KERNELS_H */
