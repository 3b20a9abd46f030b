/* Structs of what stands around the scans: convolution, decode steps, projection, norms. mamba_kernels.h has the words and
 * letters. */
#ifndef MAMBA_LAYERS_H
#define MAMBA_LAYERS_H

#include "mamba_types.h"

/* out_{d,l} = silu?(bias_d + sum_w weight_{d,w} x_{d, l-(W-1)+w}): causal depthwise convolution. x and out have either
 * stride_l == 1 or stride_d == 1. With seq_idx, taps that lie in another sequence count as zero; where it is negative, x is
 * padding and out 0. Inputs before step 0 belong to step 0's sequence: a later sequence does not see initial_states, and in a
 * row that begins with padding no step does. */
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
    const int32_t* seq_idx;     /* (B, L), optional; not together with final_states */
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
    int32_t add;               /* 1: dx is added to */
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
    const void* x_proj_weight;  /* (R + 2 N, D) contiguous; int8 with x_proj_scales */
    const void* x_proj_scales;  /* (R + 2 N, ceil(D / MAMBA_INT8_BLOCK)) float16 contiguous, as MambaLinear's; optional */
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

/* out = x weight^T + bias, for few rows: weight is read once for 8 of them. Elements of a row of x and of out have stride 1.
 * An int8 weight has scales: weight_{o,i} = scales_{o, i / MAMBA_INT8_BLOCK} int8_{o,i}.
 * norm_weight: x stands for MambaNorm's RMSNorm of x + residual, and residual_out gets the sum. mamba_cuda alone takes it, for
 * 1 row and an int8 weight: in_features a multiple of 16 and at most MAMBA_MAX_LINEAR_NORM, all of it 16-byte aligned.
 * mamba_cuda may read an int8 weight before kernels of its own ahead in the stream have ended: none of them writes int8. */
typedef struct MambaLinear {
    MambaRun run;
    int64_t rows, in_features, out_features;
    int32_t dtype;        /* of x, out */
    int32_t weight_dtype; /* dtype or MAMBA_INT8 */
    int32_t bias_dtype;
    int32_t norm_weight_dtype;
    int32_t residual_dtype; /* of residual, residual_out: dtype or float32 */
    float norm_eps;
    const void* x;           /* (R, in) */
    const void* weight;      /* (out, in) contiguous */
    const void* scales;      /* (out, ceil(in / MAMBA_INT8_BLOCK)) float16, contiguous; for int8 alone */
    const void* bias;        /* (out) contiguous, optional */
    const void* norm_weight; /* (in), optional */
    const void* residual;    /* (R, in), optional, with norm_weight alone */
    void* residual_out;      /* (R, in), required where norm_weight is; not residual's memory */
    void* out;               /* (R, out) */
    int64_t x_row_stride, out_row_stride;
} MambaLinear;

/* out = rows of an int8 weight as numbers, each rounded once: all of them, or those that indices name. Of an index that is not
 * in 0 .. weight_rows - 1 mamba_cuda makes a row of NaN, and mamba_cpu an error. Letters: R rows, N features. */
typedef struct MambaDequantize {
    MambaRun run;
    int64_t rows, features;
    int64_t weight_rows; /* without indices as many as rows */
    int32_t dtype;       /* of out */
    int32_t index_bytes; /* 4 or 8, with indices */
    const void* weight;  /* (weight_rows, N) int8, contiguous */
    const void* scales;  /* (weight_rows, ceil(N / MAMBA_INT8_BLOCK)) float16, contiguous */
    const void* indices; /* (R), optional */
    void* out;           /* (R, N) contiguous */
} MambaDequantize;

/* Greedy decoding: the token of each row is the index of its largest logit, the first of equal ones; NaN is larger than any
 * number. A row that has ended takes eos_0 instead; one whose token is in eos has ended. sequences_{r, ends_r} = token, and
 * then ends, positions and lengths are each raised by 1: what the next step of a CUDA graph reads. Elements of a row have
 * stride 1. Letters: R rows, V vocabulary, E eos_count. */
typedef struct MambaGreedyToken {
    MambaRun run;
    int64_t rows, vocabulary; /* vocabulary at most 2^30: the row may go on, with what pads the vocabulary */
    int32_t dtype;            /* of logits */
    int32_t eos_count;        /* at least 1 where ended is */
    const void* logits;       /* (R, V) */
    int64_t* tokens;          /* (R) */
    const int64_t* eos;       /* (E), required where ended is */
    uint8_t* ended;           /* (R), 0 or 1, optional */
    int64_t* sequences;       /* (R, any), optional */
    int64_t* ends;            /* (R), required where sequences is */
    int64_t* positions;       /* (R), optional */
    int32_t* lengths;         /* (R), optional */
    int64_t logits_row_stride, sequences_row_stride;
} MambaGreedyToken;

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

/* out = silu(x) y of the halves x, y of each row of xy, or y, x with gate_last; in backward dxy, and out once more. Elements of
 * a row have stride 1. */
typedef struct MambaSwiglu {
    MambaRun run;
    int64_t rows, width; /* width of a half */
    int32_t dtype;       /* of all */
    int32_t gate_last;
    const void* xy;   /* (R, 2 width) */
    const void* dout; /* (R, width), backward only */
    void* out;        /* (R, width); backward: optional */
    void* dxy;        /* (R, 2 width), backward only */
    int64_t xy_row_stride, dout_row_stride, out_row_stride, dxy_row_stride;
} MambaSwiglu;

/* The cross entropy of each row l of logits and its label y, and in place of the row the gradient of the losses' sum:
 * lse = log sum_j exp(l_j); loss = -(1 - s) (l_y - lse) - s (mean_j l_j - lse) + z lse^2 with s = label_smoothing, z = z_loss;
 * gradient_j = exp(l_j - lse) (1 + 2 z lse) - s / V, and less 1 - s for j = y. A row whose label is ignore_index is not read:
 * loss and gradient are 0. One whose label is neither that nor in 0 .. V - 1 has NaN for both. Elements of a row have stride 1.
 * Letters: R rows, V vocabulary. */
typedef struct MambaCrossEntropy {
    MambaRun run;
    int64_t rows, vocabulary; /* vocabulary at most 2^30 */
    int64_t ignore_index;
    int32_t dtype;    /* of logits */
    int32_t gradient; /* 0: logits are only read */
    float label_smoothing, z_loss;
    void* logits;          /* (R, V) */
    const int64_t* labels; /* (R) */
    float* losses;         /* (R) */
    int64_t logits_row_stride;
} MambaCrossEntropy;

#endif /* MAMBA_LAYERS_H */
