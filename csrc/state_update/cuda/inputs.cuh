// What the decode step's kernels read beside the state, and where a warp finds it.
#pragma once

#include "common/divisor.cuh"
#include "state_update/cuda/rows.cuh"

namespace mamba {

constexpr int kUpdateWarpsLog2 = 2;  // of a block, at most
constexpr int kUpdateThreads = 32 << kUpdateWarpsLog2;

// How the launcher shares out the rows.
struct StateUpdateLayout {
    Divisor parts, heads, group_heads;  // blocks along headdim; heads; heads of a group
    int32_t lanes_log2;                 // that share a row
    int32_t tiles;                      // of rows a warp
    int32_t batches_log2;               // batches in a block, one a warp
};

// The rows of a warp, from `first` on, of one head and batch. Indices have 32 bits: their products with strides have 64.
struct WarpPlace {
    uint32_t batch, head, group, first, own;
    int rows_left;
    bool owns;  // the row `own` is this lane's to compute what there is once for it

    template <class Rows>
    __device__ __forceinline__ WarpPlace(const MambaSelectiveStateUpdate& p, const StateUpdateLayout& layout,
                                         const Rows& rows) {
        const uint32_t warp = threadIdx.x >> 5;
        const uint32_t block = layout.parts.quotient(blockIdx.x);
        const uint32_t batch_block = layout.heads.quotient(block);
        const uint32_t row_warps = (blockDim.x >> 5) >> layout.batches_log2;
        const uint32_t row_warp = (blockIdx.x - block * layout.parts.divisor) * row_warps + (warp >> layout.batches_log2);
        head = block - batch_block * layout.heads.divisor;
        group = layout.group_heads.quotient(head);
        batch = (batch_block << layout.batches_log2) + (warp & ((1u << layout.batches_log2) - 1));
        first = row_warp * layout.tiles * rows.tile_rows();
        own = first + rows.own_row();
        rows_left = batch < p.batch && first < p.headdim ? static_cast<int>(p.headdim - first) : 0;
        owns = rows.own_tile() < layout.tiles && rows.own_row() < rows_left;
    }
    __device__ __forceinline__ bool has_rows() const { return rows_left > 0; }
    template <typename State, class Rows>
    __device__ __forceinline__ StatePlace<State> states(const MambaSelectiveStateUpdate& p, const Rows& rows,
                                                        int64_t row) const {
        State* const states = static_cast<State*>(p.state) + row * p.state_row_stride + head * p.state_head_stride;
        return {states + (first + rows.row_of(0)) * p.state_dim_stride, p.state_dim_stride << (5 - rows.lanes_log2),
                p.state_dstate_stride, rows_left, static_cast<int>(p.dstate)};
    }
    __device__ __forceinline__ void store(const MambaSelectiveStateUpdate& p, uint32_t step, float y) const {
        if (owns) {
            const int64_t index = batch * p.out_batch_stride + step * p.out_len_stride + head * p.out_head_stride;
            store_from_float(p.out, index + own * p.out_dim_stride, p.x_dtype, y);
        }
    }
    // Padding is zero. A row beyond the cache cannot be reported from here: NaN shows it, and nothing is overwritten.
    __device__ __forceinline__ void store_without_state(const MambaSelectiveStateUpdate& p, uint32_t step, int64_t row) const {
        store(p, step, row < 0 ? 0.0f : __int_as_float(0x7fffffff));
    }
};

// The parameters of the lane's own row, as bits.
struct RowParameters {
    uint32_t A, D, dt_bias;

    __device__ __forceinline__ RowParameters(const MambaSelectiveStateUpdate& p, const WarpPlace& warp, bool scalar_A)
        : A(0), D(0), dt_bias(0) {
        if (!warp.owns) {
            return;
        }
        if (scalar_A) {
            A = load_bits(p.A, warp.head * p.A_head_stride + warp.own * p.A_dim_stride, p.A_dtype);
        }
        if (p.D != nullptr) {
            D = load_bits(p.D, warp.head * p.D_head_stride + warp.own * p.D_dim_stride, p.D_dtype);
        }
        if (p.dt_bias != nullptr) {
            dt_bias =
                load_bits(p.dt_bias, warp.head * p.dt_bias_head_stride + warp.own * p.dt_bias_dim_stride, p.dt_bias_dtype);
        }
    }
    __device__ __forceinline__ float dt(const MambaSelectiveStateUpdate& p, uint32_t bits) const {
        float dt = float_from_bits(bits, p.dt_dtype);
        if (p.dt_bias != nullptr) {
            dt += float_from_bits(dt_bias, p.dt_bias_dtype);
        }
        return p.dt_softplus ? softplus(dt) : dt;
    }
    // As advance() takes it.
    template <bool kScalarA>
    __device__ __forceinline__ float decay(const MambaSelectiveStateUpdate& p, float dt) const {
        return kScalarA ? exp2_fast(dt * kLog2e * float_from_bits(A, p.A_dtype)) : dt * kLog2e;
    }
    __device__ __forceinline__ float output(const MambaSelectiveStateUpdate& p, float y, float x, uint32_t z_bits) const {
        if (p.D != nullptr) {  // 0 times an infinite x would be NaN
            y = fmaf(float_from_bits(D, p.D_dtype), x, y);
        }
        return p.z != nullptr ? y * silu(float_from_bits(z_bits, p.x_dtype)) : y;
    }
};

// A step's inputs, as bits: those of the lane's own row, and the lane's parts of B and C.
template <class Rows>
struct UpdateInputs {
    uint32_t x = 0, dt = 0, z = 0;
    NeighbourBits<Rows::kVector> B[Rows::kVectors], C[Rows::kVectors];

    __device__ __forceinline__ UpdateInputs(const MambaSelectiveStateUpdate& p, const WarpPlace& at, const Rows& rows,
                                            uint32_t step) {
        if (at.owns) {
            const int64_t x_index = at.batch * p.x_batch_stride + step * p.x_len_stride + at.head * p.x_head_stride;
            const int64_t dt_index = at.batch * p.dt_batch_stride + step * p.dt_len_stride + at.head * p.dt_head_stride;
            x = load_bits(p.x, x_index + at.own * p.x_dim_stride, p.x_dtype);
            dt = load_bits(p.dt, dt_index + at.own * p.dt_dim_stride, p.dt_dtype);
            if (p.z != nullptr) {
                const int64_t z_index = at.batch * p.z_batch_stride + step * p.z_len_stride + at.head * p.z_head_stride;
                z = load_bits(p.z, z_index + at.own * p.z_dim_stride, p.x_dtype);
            }
        }
        const int64_t B_index = at.batch * p.B_batch_stride + step * p.B_len_stride + at.group * p.B_group_stride;
        const int64_t C_index = at.batch * p.C_batch_stride + step * p.C_len_stride + at.group * p.C_group_stride;
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            const int n = rows.state_of(v);
            const bool valid = n < p.dstate;
            B[v].load(p.B, B_index + (Rows::kVector == 1 ? n * p.B_dstate_stride : n), p.BC_dtype, valid);
            C[v].load(p.C, C_index + (Rows::kVector == 1 ? n * p.C_dstate_stride : n), p.BC_dtype, valid);
        }
    }
    __device__ __forceinline__ void to_floats(const MambaSelectiveStateUpdate& p, float* B_values, float* C_values) const {
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            B[v].to_floats(p.BC_dtype, B_values + v * Rows::kVector);
            C[v].to_floats(p.BC_dtype, C_values + v * Rows::kVector);
        }
    }
};

// A of a tile's rows, where each state has its own.
template <class Rows>
struct VectorsOfA {
    NeighbourBits<Rows::kVector> bits[Rows::kRows][Rows::kVectors];

    // index: of the lane's first row
    __device__ __forceinline__ void load(const MambaSelectiveStateUpdate& p, const Rows& rows, int64_t index, int rows_left) {
        const int64_t step = p.A_dim_stride << (5 - rows.lanes_log2);
#pragma unroll
        for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Rows::kVectors; ++v) {
                const int n = rows.state_of(v);
                bits[r][v].load(p.A, index + r * step + (Rows::kVector == 1 ? n * p.A_dstate_stride : n), p.A_dtype,
                                rows.row_of(r) < rows_left && n < p.dstate);
            }
        }
    }
};

}  // namespace mamba
