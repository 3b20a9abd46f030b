// What the decode step's kernels read beside the state, and where a warp finds it.
#pragma once

#include "common/divisor.cuh"
#include "common/ptx_hints.cuh"
#include "state_update/cuda/rows.cuh"

namespace mamba {

// How the launcher shares out the work. A unit is a tile of rows of one head; a warp takes one of some batch entries.
struct StateUpdateLayout {
    Divisor parts, units, group_heads;  // units of a head, of all heads; heads of a group
    int32_t lanes_log2;                 // that share a row
    uint32_t batches;                   // of a warp, which follow each other
    bool vectors;                       // of 16 bytes: state, A, B and C are read so (whole tiles: always)
    bool tied_A;                        // one A for all states of a row
};

// Params whose dtypes are known when the kernel is compiled, for most of a step's instructions would ask for them: inputs have
// the state's dtype, or bfloat16 beside a float32 state, and A is float32.
template <typename State>
struct StateUpdateOf16BitInputs : MambaSelectiveStateUpdate {
    static constexpr int32_t x_dtype = kDtype<State> == MAMBA_FLOAT32 ? MAMBA_BFLOAT16 : kDtype<State>, dt_dtype = x_dtype,
                             BC_dtype = x_dtype, A_dtype = MAMBA_FLOAT32;
};

// The rows of a warp, from `first` on, of one head. Indices have 32 bits: their products with strides have 64.
struct WarpPlace {
    uint32_t batch, batch_end, head, group, first, own;
    int rows_left;
    bool owns;  // the row `own` is this lane's to compute what there is once for it
    bool vectors;

    template <class Rows>
    __device__ __forceinline__ WarpPlace(const MambaSelectiveStateUpdate& p, const StateUpdateLayout& layout,
                                         const Rows& rows) {
        const uint32_t warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
        const uint32_t walk = layout.units.quotient(warp);
        const uint32_t unit = warp - walk * layout.units.divisor;
        head = layout.parts.quotient(unit);
        group = layout.group_heads.quotient(head);
        batch = walk * layout.batches;
        batch_end = batch + layout.batches < p.batch ? batch + layout.batches : static_cast<uint32_t>(p.batch);
        first = (unit - head * layout.parts.divisor) * rows.tile_rows();
        own = first + rows.own_row();
        rows_left = batch < p.batch ? static_cast<int>(p.headdim - first) : 0;
        owns = rows.own_tile() == 0 && rows.own_row() < rows_left;
        vectors = Rows::kWhole || layout.vectors;
    }
    __device__ __forceinline__ bool has_rows() const { return rows_left > 0; }
    // Of a row that the cache does not have nothing may be touched.
    template <typename State, class Rows>
    __device__ __forceinline__ StatePlace<State> states(const MambaSelectiveStateUpdate& p, const Rows& rows,
                                                        int64_t row) const {
        State* const states = static_cast<State*>(p.state) + row * p.state_row_stride + head * p.state_head_stride;
        return {states + (first + rows.row_of(0)) * p.state_dim_stride,
                p.state_dim_stride << (5 - rows.lanes_log2),
                p.state_dstate_stride,
                row >= 0 && row < p.state_rows ? rows_left : 0,
                static_cast<int>(p.dstate),
                vectors};
    }
};

// The parameters of the lane's own row, as they lie in memory: loaded together, converted later.
struct RowBits {
    uint32_t A = 0, D = 0, dt_bias = 0;

    template <class Params>
    __device__ __forceinline__ RowBits(const Params& p, const WarpPlace& warp, bool tied_A) {
        if (!warp.owns) {
            return;
        }
        if (tied_A) {
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
};

struct RowParameters {
    float A, D, dt_bias;
    bool dt_softplus, has_D, has_z;

    template <class Params>
    __device__ __forceinline__ RowParameters(const Params& p, const RowBits& bits)
        : A(float_from_bits(bits.A, p.A_dtype)),
          D(float_from_bits(bits.D, p.D_dtype)),
          dt_bias(p.dt_bias != nullptr ? float_from_bits(bits.dt_bias, p.dt_bias_dtype) : 0.0f),
          dt_softplus(p.dt_softplus != 0),
          has_D(p.D != nullptr),
          has_z(p.z != nullptr) {}
    template <class Params>
    __device__ __forceinline__ float dt(const Params& p, uint32_t bits) const {
        const float dt = float_from_bits(bits, p.dt_dtype) + dt_bias;
        return dt_softplus ? softplus(dt) : dt;
    }
    // As advance() takes it.
    __device__ __forceinline__ float decay(float dt, bool tied_A) const {
        return tied_A ? exp2_fast(dt * kLog2e * A) : dt * kLog2e;
    }
    template <class Params>
    __device__ __forceinline__ float output(const Params& p, float y, float x, uint32_t z_bits) const {
        if (has_D) {  // 0 times an infinite x would be NaN
            y = fmaf(D, x, y);
        }
        return has_z ? y * silu(float_from_bits(z_bits, p.x_dtype)) : y;
    }
};

// Where a lane finds a step's inputs and puts its output, in elements: of its own row, and its parts of B and C.
struct StepPlace {
    int64_t x, dt, z, out, B, C;

    template <class Rows>
    __device__ __forceinline__ StepPlace(const MambaSelectiveStateUpdate& p, const WarpPlace& at, const Rows& rows)
        : x(at.batch * p.x_batch_stride + at.head * p.x_head_stride + at.own * p.x_dim_stride),
          dt(at.batch * p.dt_batch_stride + at.head * p.dt_head_stride + at.own * p.dt_dim_stride),
          z(at.batch * p.z_batch_stride + at.head * p.z_head_stride + at.own * p.z_dim_stride),
          out(at.batch * p.out_batch_stride + at.head * p.out_head_stride + at.own * p.out_dim_stride),
          B(at.batch * p.B_batch_stride + at.group * p.B_group_stride + rows.state_of(0) * p.B_dstate_stride),
          C(at.batch * p.C_batch_stride + at.group * p.C_group_stride + rows.state_of(0) * p.C_dstate_stride) {}
    // Those of the lane's own row come as far as the L2.
    template <class Params>
    __device__ __forceinline__ void prefetch(const Params& p) const {
        prefetch_to_L2(static_cast<const char*>(p.x) + x * (p.x_dtype == MAMBA_FLOAT32 ? 4 : 2));
        prefetch_to_L2(static_cast<const char*>(p.dt) + dt * (p.dt_dtype == MAMBA_FLOAT32 ? 4 : 2));
        if (p.z != nullptr) {
            prefetch_to_L2(static_cast<const char*>(p.z) + z * (p.x_dtype == MAMBA_FLOAT32 ? 4 : 2));
        }
    }
    __device__ __forceinline__ void next_batch(const MambaSelectiveStateUpdate& p) {
        x += p.x_batch_stride;
        dt += p.dt_batch_stride;
        z += p.z_batch_stride;
        out += p.out_batch_stride;
        B += p.B_batch_stride;
        C += p.C_batch_stride;
    }
    __device__ __forceinline__ void next_step(const MambaSelectiveStateUpdate& p) {
        x += p.x_len_stride;
        dt += p.dt_len_stride;
        z += p.z_len_stride;
        out += p.out_len_stride;
        B += p.B_len_stride;
        C += p.C_len_stride;
    }
};

// load_bits of what each row has once. Beside whole tiles that is 2 bytes where the states are 32 or more: alone these would be
// the smallest pieces that the memory is asked for.
template <class Rows>
__device__ __forceinline__ uint32_t load_of_row(const void* data, int64_t index, int32_t dtype) {
    if constexpr (Rows::kWhole) {
        return ld_global_l2_256b_u16(static_cast<const uint16_t*>(data) + index);
    } else {
        return load_bits(data, index, dtype);
    }
}

// A lane's entries of B, of C or of a row of A: of `left` that there are. vectors: neighbours, in accesses of 16 bytes.
template <class Rows>
__device__ __forceinline__ void load_states(NeighbourBits<Rows::kVector>& bits, const void* data, int64_t index, int64_t stride,
                                            int32_t dtype, bool vectors, int left) {
    if (Rows::kWhole || vectors) {
        bits.load(data, index, dtype, Rows::kWhole || left > 0);
    } else {
        bits.gather(data, index, stride, dtype, left);
    }
}

// A step's inputs, as bits: those of the lane's own row, and the lane's parts of B and C.
template <class Rows>
struct UpdateInputs {
    uint32_t x = 0, dt = 0, z = 0;
    NeighbourBits<Rows::kVector> B[Rows::kVectors], C[Rows::kVectors];

    template <class Params>
    __device__ __forceinline__ UpdateInputs(const Params& p, const WarpPlace& warp, const Rows& rows, const StepPlace& at) {
        if (warp.owns) {
            x = load_of_row<Rows>(p.x, at.x, p.x_dtype);
            dt = load_of_row<Rows>(p.dt, at.dt, p.dt_dtype);
            if (p.z != nullptr) {
                z = load_of_row<Rows>(p.z, at.z, p.x_dtype);
            }
        }
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            const int distance = rows.state_of(v) - rows.state_of(0);
            load_states<Rows>(B[v], p.B, at.B + distance * p.B_dstate_stride, p.B_dstate_stride, p.BC_dtype, warp.vectors,
                              static_cast<int>(p.dstate) - rows.state_of(v));
            load_states<Rows>(C[v], p.C, at.C + distance * p.C_dstate_stride, p.C_dstate_stride, p.BC_dtype, warp.vectors,
                              static_cast<int>(p.dstate) - rows.state_of(v));
        }
    }
    template <class Params>
    __device__ __forceinline__ void to_floats(const Params& p, float* B_values, float* C_values) const {
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            B[v].to_floats(p.BC_dtype, B_values + v * Rows::kVector);
            C[v].to_floats(p.BC_dtype, C_values + v * Rows::kVector);
        }
    }
};

// A of a unit's rows, where each state has its own.
template <class Rows>
struct VectorsOfA {
    NeighbourBits<Rows::kVector> bits[Rows::kRows][Rows::kVectors];

    template <class Params>
    __device__ __forceinline__ void load(const Params& p, const WarpPlace& warp, const Rows& rows) {
        const int64_t index = warp.head * p.A_head_stride + (warp.first + rows.row_of(0)) * p.A_dim_stride;
        const int64_t step = p.A_dim_stride << (5 - rows.lanes_log2);
#pragma unroll
        for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Rows::kVectors; ++v) {
                const int n = rows.state_of(v);
                load_states<Rows>(bits[r][v], p.A, index + r * step + n * p.A_dstate_stride, p.A_dstate_stride, p.A_dtype,
                                  warp.vectors, rows.row_of(r) < warp.rows_left ? static_cast<int>(p.dstate) - n : 0);
            }
        }
    }
};

}  // namespace mamba
