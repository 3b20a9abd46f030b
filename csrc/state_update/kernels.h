// The decode step's kernels.
#pragma once

#include "common/kernel_table.h"
#include "mamba_kernels.h"
#include "state_update/rows.h"

namespace mamba {

struct StateUpdateKernel : KernelRow {
    bool (*takes)(const MambaSelectiveStateUpdate& p);
    int rows, vectors;  // of the state in a lane: so many rows, and of each so many vectors of 16 bytes
    bool whole_tiles;   // kernel.cuh, else steps.cuh
    bool tied_A;
    int blocks;  // on a multiprocessor, which bound the registers
};

inline bool has_tied_A(const MambaSelectiveStateUpdate& p) {
    return p.A_dstate_stride == 0 || p.dstate == 1;
}

// Whether a lane reads `count` neighbouring states of a tensor at once, in accesses of up to 16 bytes.
template <typename... Strides>
bool has_state_vectors(const void* data, int32_t dtype, int64_t count, int64_t dstate_stride, Strides... strides) {
    const int64_t bytes = dtype_size(dtype) * count;
    return dstate_stride == 1 && rows_aligned(data, dtype_size(dtype), bytes < 16 ? bytes : 16, strides...);
}

// Whether state, A, B and C can be read in the vectors of the state's dtype.
inline bool has_vectors(const MambaSelectiveStateUpdate& p) {
    const int64_t count = 16 / dtype_size(p.state_dtype), heads = p.nheads, headdim = p.headdim, steps = p.seqlen;
    return p.dstate % count == 0 &&
           has_state_vectors(p.state, p.state_dtype, count, p.state_dstate_stride,
                             used_stride(p.state_rows, p.state_row_stride), used_stride(heads, p.state_head_stride),
                             used_stride(headdim, p.state_dim_stride)) &&
           has_state_vectors(p.step_states, p.state_dtype, count, p.step_states == nullptr ? 1 : p.step_states_dstate_stride,
                             used_stride(p.batch, p.step_states_batch_stride), used_stride(steps, p.step_states_len_stride),
                             used_stride(heads, p.step_states_head_stride), used_stride(headdim, p.step_states_dim_stride)) &&
           has_state_vectors(p.B, p.BC_dtype, count, p.B_dstate_stride, used_stride(p.batch, p.B_batch_stride),
                             used_stride(steps, p.B_len_stride), used_stride(p.ngroups, p.B_group_stride)) &&
           has_state_vectors(p.C, p.BC_dtype, count, p.C_dstate_stride, used_stride(p.batch, p.C_batch_stride),
                             used_stride(steps, p.C_len_stride), used_stride(p.ngroups, p.C_group_stride)) &&
           (has_tied_A(p) || has_state_vectors(p.A, p.A_dtype, count, p.A_dstate_stride, used_stride(heads, p.A_head_stride),
                                               used_stride(headdim, p.A_dim_stride)));
}

// One step in place, of a 16-bit model with float32 A: inputs of the state's dtype, or bfloat16 beside a float32 state.
inline bool is_step_of_16_bit_inputs(const MambaSelectiveStateUpdate& p) {
    const int32_t dtype = p.state_dtype == MAMBA_FLOAT32 ? MAMBA_BFLOAT16 : p.state_dtype;
    return p.seqlen == 1 && p.dst_state_batch_indices == nullptr && p.step_states == nullptr && p.x_dtype == dtype &&
           p.dt_dtype == dtype && p.BC_dtype == dtype && p.A_dtype == MAMBA_FLOAT32;
}

template <int kRows>
bool takes_tied_A(const MambaSelectiveStateUpdate& p) {
    return is_step_of_16_bit_inputs(p) && has_tied_A(p) &&
           has_whole_tiles(p.headdim, p.dstate, p.state_dim_stride, p.state_dtype, kRows) && has_vectors(p);
}
template <int kRows>
bool takes_full_A(const MambaSelectiveStateUpdate& p) {
    return is_step_of_16_bit_inputs(p) && !has_tied_A(p) &&
           has_whole_tiles(p.headdim, p.dstate, p.state_dim_stride, p.state_dtype, kRows) && has_vectors(p);
}
inline bool takes_any_update(const MambaSelectiveStateUpdate&) {
    return true;
}

inline constexpr char kNeedsTiedA[] =
    "1 step in place; 16-bit inputs; tied float32 A; whole tiles of contiguous states; dstate a power of 2 >= 64 bytes";
inline constexpr char kNeedsFullA[] =
    "1 step in place; 16-bit inputs; float32 A; whole tiles of contiguous states; dstate a power of 2 >= 16";

inline constexpr StateUpdateKernel kStateUpdateKernels[] = {
    // name, needs, shape, dtypes (of the state), threads, shared bytes, architecture;
    // takes, rows, vectors, whole tiles, tied A, blocks
    {{"step_tied_A", kNeedsTiedA, "4 rows x 16 bytes a lane", kAllDtypes, 256, 0, 75}, takes_tied_A<4>, 4, 1, true, true, 2},
    {{"step_16_bit_state", kNeedsFullA, "2 rows x 16 bytes a lane", k16Bit, 128, 0, 75}, takes_full_A<2>, 2, 1, true, false, 3},
    {{"step_float32_state", kNeedsFullA, "4 rows x 16 bytes a lane", kF32, 256, 0, 75}, takes_full_A<4>, 4, 1, true, false, 2},
    {{"steps_16_bit_state", "", "2 rows x 16 bytes a lane", k16Bit, 128, 0, 75}, takes_any_update, 2, 1, false, false, 1},
    {{"steps_float32_state", "", "2 rows x 32 bytes a lane", kF32, 128, 0, 75}, takes_any_update, 2, 2, false, false, 1},
};
extern KernelTable state_update_table;

}  // namespace mamba
