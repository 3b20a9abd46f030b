// The kernels of Mamba-3's scan, forward, and of its decoding step. A row of the scan is a path of several kernels, see
// README.md; backward_kernels.h has backward's.
#pragma once

#include "common/kernel_table.h"
#include "mamba3/plan.h"

namespace mamba {

// ---- the scan --------------------------------------------------------------------------------------------------------

struct Mamba3ForwardKernel : KernelRow {
    bool (*takes)(const MambaMamba3& p);
    int warpgroup_ranks;  // 0: the general kernel
    int states;           // dstate is at most that
    int rows;             // of a chunk, steps times rank
    int blocks;           // that a multiprocessor of Hopper holds
};

inline bool mamba3_rows_of_z_and_out_aligned(const MambaMamba3& p) {
    const int64_t size = dtype_size(p.dtype);
    return rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
           rows_aligned(p.out, size, 16, p.out_batch_stride, p.out_len_stride, p.out_head_stride);
}
// A norm goes over the columns of one block.
inline bool takes_mamba3_siso(const MambaMamba3& p) {
    return mamba3_siso_fits(p) && (p.norm_weight == nullptr || p.headdim <= kMamba3StateRows) &&
           mamba3_rows_of_z_and_out_aligned(p);
}
inline bool takes_mamba3_siso_64(const MambaMamba3& p) {
    return p.dstate <= 64 && takes_mamba3_siso(p);
}
inline bool takes_mamba3_mimo4(const MambaMamba3& p) {
    return mamba3_mimo_fits(p) && p.z != nullptr && p.mimo_out != nullptr && p.norm_weight == nullptr &&
           mamba3_stride_fits(p.z_len_stride) && mamba3_stride_fits(p.out_len_stride) && mamba3_rows_of_z_and_out_aligned(p);
}
inline bool takes_mamba3_64(const MambaMamba3& p) {
    return p.dstate <= 64;
}
inline bool takes_mamba3_128(const MambaMamba3& p) {
    return p.dstate <= 128;
}
inline bool takes_any_mamba3(const MambaMamba3&) {
    return true;
}

// Shared memory of the general kernel: what every GPU has.
constexpr int kMamba3ForwardShared = 64 * 1024;

inline constexpr Mamba3ForwardKernel kMamba3ForwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, warpgroup_ranks, states, rows, blocks
    {{"siso_states64",
      "SISO (pairwise, rank 1, no projections), no seq_idx, N <= 64 and N % 4 == 0, a norm only of P <= 64, "
      "rows aligned",
      "64 rows of headdim, 64 steps a chunk", k16Bit, 256, 69 * 1024, 90},
     takes_mamba3_siso_64,
     1,
     64,
     64,
     2},
    {{"siso_states128", "the same, N <= 128", "64 rows of headdim, 64 steps a chunk", k16Bit, 256, 109 * 1024, 90},
     takes_mamba3_siso,
     1,
     128,
     64,
     2},
    {{"mimo4_states128",
      "MIMO of rank 4 with z and output projection, no norm, no seq_idx, N == 128, at most 32 angles, rows "
      "aligned",
      "64 rows of headdim, 16 steps of 4 ranks a chunk", k16Bit, 256, 113 * 1024, 90},
     takes_mamba3_mimo4,
     4,
     128,
     64,
     2},
    {{"states64", "N <= 64", "64 rows of headdim, 64 rows a chunk", k16Bit, 128, kMamba3ForwardShared, 75},
     takes_mamba3_64,
     0,
     64,
     64,
     4},
    {{"states128", "N <= 128", "64 rows of headdim, 64 rows a chunk", k16Bit, 128, kMamba3ForwardShared, 75},
     takes_mamba3_128,
     0,
     128,
     64,
     4},
    {{"states256", "", "64 rows of headdim, 32 rows a chunk", k16Bit, 128, kMamba3ForwardShared, 75},
     takes_any_mamba3,
     0,
     256,
     32,
     2},
    {{"float32_states128", "N <= 128", "64 rows of headdim, 16 rows a chunk", kF32, 128, kMamba3ForwardShared, 75},
     takes_mamba3_128,
     0,
     128,
     16,
     4},
    {{"float32_states256", "", "64 rows of headdim, 16 rows a chunk", kF32, 128, kMamba3ForwardShared, 75},
     takes_any_mamba3,
     0,
     256,
     16,
     2},
};
extern KernelTable mamba3_forward_table;

// ---- the decoding step -----------------------------------------------------------------------------------------------

// dtypes: of the state.
struct Mamba3StepKernel : KernelRow {
    bool (*takes)(const MambaMamba3Step& q);
    int ranks;        // whose entries are in registers together
    bool any_dtypes;  // and any rank; else those of mamba3_step_is_usual and that rank
    int vectors;      // of 16 bytes that a lane has of a state's row, and the rows of all ranks are in shared memory together;
                      // 0: states one by one, and some ranks at a time
    bool products;    // of the state on tensor cores
};

constexpr int64_t kMamba3StepMostRows = 28 * 1024;  // bytes that the rows of all ranks take together
constexpr int kMamba3ProductStates = 128;           // at most

inline int64_t mamba3_step_pitch(const MambaMamba3& p) {
    return round_up(p.dstate, 4);
}
inline int64_t mamba3_step_rank_bytes(const MambaMamba3& p) {
    return (3 * mamba3_step_pitch(p) + 2 * p.headdim) * 4;
}
inline int64_t mamba3_step_output_bytes(const MambaMamba3& p) {
    return p.rank * (p.headdim + 1) * 4;
}
// Whether all but the state and the parameters, float32, is of the state's dtype; of a float32 state, the cache's default,
// bfloat16.
MAMBA_HOST_DEVICE constexpr int32_t mamba3_step_inputs(int32_t state_dtype) {
    return state_dtype == MAMBA_FLOAT32 ? MAMBA_BFLOAT16 : state_dtype;
}
inline bool mamba3_step_is_usual(const MambaMamba3Step& q) {
    const MambaMamba3& p = q.scan;
    const int32_t dtype = mamba3_step_inputs(q.ssm_dtype);
    const bool weights = q.q_weight != nullptr || q.k_weight != nullptr || p.norm_weight != nullptr;
    return p.dtype == dtype && p.adt_dtype == dtype && p.dt_dtype == dtype && p.trap_dtype == dtype && p.angle_dtype == dtype &&
           (!weights || q.weight_dtype == dtype) && q.k_dtype == dtype && q.v_dtype == dtype &&
           q.parameter_dtype == MAMBA_FLOAT32;
}
// Vectors of up to 256 states, or of as many as 32 lanes have of one vector each.
inline bool takes_mamba3_step_vectors(const MambaMamba3Step& q) {
    return q.scan.dstate % (16 / dtype_size(q.ssm_dtype)) == 0 && pointer_is_aligned(q.state_ssm, 16) &&
           q.scan.rank * mamba3_step_rank_bytes(q.scan) <= kMamba3StepMostRows;
}
inline bool takes_mamba3_step_one_vector(const MambaMamba3Step& q) {
    return q.scan.dstate <= 32 * (16 / dtype_size(q.ssm_dtype)) && takes_mamba3_step_vectors(q);
}
inline bool takes_mamba3_step_rank1_any_dtypes(const MambaMamba3Step& q) {
    return q.scan.rank == 1 && takes_mamba3_step_one_vector(q);
}
inline bool takes_mamba3_step_rank1(const MambaMamba3Step& q) {
    return mamba3_step_is_usual(q) && takes_mamba3_step_rank1_any_dtypes(q);
}
inline bool takes_mamba3_step_rank4(const MambaMamba3Step& q) {
    return q.scan.rank == 4 && mamba3_step_is_usual(q) && takes_mamba3_step_one_vector(q);
}
inline bool takes_mamba3_step_products(const MambaMamba3Step& q) {
    return q.scan.dstate <= kMamba3ProductStates && takes_mamba3_step_rank4(q);
}
inline bool takes_any_mamba3_step(const MambaMamba3Step&) {
    return true;
}

// A step is refused where a GPU has less shared memory than its ranks and headdim need.
constexpr int kMamba3StepShared = 227 * 1024;

inline constexpr Mamba3StepKernel kMamba3StepKernels[] = {
    // name, needs, shape, dtypes (of the state), threads, shared bytes, architecture; takes, ranks, any_dtypes, vectors,
    // products
    {{"rank1",
      "rank 1; beside a float32 state bfloat16, else all of the state's dtype; states in 16-byte vectors, float32 N <= 128",
      "a head of a batch entry", kAllDtypes, 128, kMamba3StepShared, 75},
     takes_mamba3_step_rank1,
     1,
     false,
     1,
     false},
    {{"rank4_tensor_cores", "the same of rank 4, N <= 128", "a head of a batch entry", k16Bit, 128, kMamba3StepShared, 80},
     takes_mamba3_step_products,
     4,
     false,
     1,
     true},
    {{"rank4", "the same of rank 4", "a head of a batch entry", kF32, 128, kMamba3StepShared, 75},
     takes_mamba3_step_rank4,
     4,
     false,
     1,
     false},
    {{"rank1_any_dtypes", "rank 1; states in 16-byte vectors, float32 N <= 128", "a head of a batch entry", kAllDtypes, 128,
      kMamba3StepShared, 75},
     takes_mamba3_step_rank1_any_dtypes,
     1,
     true,
     1,
     false},
    {{"vectors", "states in 16-byte vectors; rows of all ranks in 28 KB", "a head of a batch entry", k16Bit, 128,
      kMamba3StepShared, 75},
     takes_mamba3_step_vectors,
     4,
     true,
     1,
     false},
    {{"float32_vectors", "the same", "a head of a batch entry", kF32, 128, kMamba3StepShared, 75},
     takes_mamba3_step_vectors,
     4,
     true,
     2,
     false},
    {{"any", "", "a head of a batch entry", kAllDtypes, 128, kMamba3StepShared, 75}, takes_any_mamba3_step, 4, true, 0, false},
};
extern KernelTable mamba3_step_table;

}  // namespace mamba
