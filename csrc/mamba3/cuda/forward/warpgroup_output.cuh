// What follows the scan in forward/warpgroup.cuh: D, norm and gate of the rows of y in a warpgroup's accumulators, of one rank.
// The results leave through shared memory, where z was.
#pragma once

#include "mamba3/cuda/forward/warpgroup_tiles.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of a warp.
template <typename T>
struct Mamba3Finisher {
    static constexpr int kNone = 1 << 30;
    const T* z;  // the lane's first piece in a chunk's steps of the warp, if there is z
    T* out;
    int64_t z_stride, out_stride;
    T* own;  // the warp's rows of the tile of z and results
    bool has_z;
    int row;    // of the lane's first piece of z and results; kNone where its columns do not exist
    int piece;  // where it is in `own`
    int left;   // steps of the chunk from the warp's first one on, or more
    int columns;
    float D;

    __device__ __forceinline__ Mamba3Finisher(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                              const Mamba3Block& block, T* tile, int warp, int lane)
        : z_stride(p.z_len_stride),
          out_stride(p.out_len_stride),
          own(tile + 16 * warp * kMamba3StateRows),
          has_z(p.z != nullptr),
          columns(block.columns),
          D(p.D != nullptr ? p.D[block.head] : 0.0f) {
        const int64_t first = block.first_step(launch.chunks) + 16 * warp;
        left = static_cast<int>(block.range.begin + block.range.seqlen - first);
        const int first_row = lane / 8, column = lane % 8 * 8;
        const int64_t at = block.row0 + column;
        row = opaque(column < columns ? first_row : kNone);
        piece = opaque(Mamba3XTile::at(first_row, column));
        z = static_cast<const T*>(p.z) + block.range.row * p.z_batch_stride + (first + first_row) * p.z_len_stride +
            block.head * p.z_head_stride + at;
        out = static_cast<T*>(p.out) + block.range.row * p.out_batch_stride + (first + first_row) * p.out_len_stride +
              block.head * p.out_head_stride + at;
    }

    // A lane's pieces are four rows apart: the one i rows on.
    __device__ __forceinline__ T* piece_on(int i) const {
        return own + (i % 8 == 0 ? piece : piece ^ (4 * kMamba3StateRows + 4 * 8)) + i / 8 * 8 * kMamba3StateRows;
    }
    __device__ __forceinline__ void begin_z_copies() const {
        if (has_z) {
            const T* from = z;
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                from = opaque(from);
                cp_async<16>(piece_on(i), from, row < left - i);
                from += 4 * z_stride;
            }
            cp_async_commit_group();
        }
    }

    // The lane's pieces of the tile's rows, of which there are `rows`, behind __syncwarp().
    __device__ __forceinline__ void store_pieces(T* to, int64_t stride, int rows) const {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            to = opaque(to);
            if (row < rows - i) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(piece_on(i));
            }
            to += 4 * stride;
        }
    }
    __device__ __forceinline__ void next_chunk() {
        z += kMamba3ChunkRows * z_stride;
        out += kMamba3ChunkRows * out_stride;
        left -= kMamba3ChunkRows;
    }
};

// y: the warp's rows. x: the address in x's tile for ldmatrix_x4. Without norm. kGated: there is
// z; a branch at each element would keep their special functions apart.
template <bool kGated, typename T>
__device__ __forceinline__ void finish_plain_rows(const Mamba3Finisher<T>& finisher, float (&y)[8][4], const T* x, int lane) {
    T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
    Operand<T> inputs[2], gates[2];  // of these columns and of the next ones
    const auto load = [&](int k) {
        ldmatrix_x4(inputs[k % 2].r[0], columns_on(x, k));
        if (kGated) {
            ldmatrix_x4(gates[k % 2].r[0], columns_on(at, k));
        }
    };
    load(0);
#pragma unroll
    for (int k = 0; k < kMamba3StateRows / 16; ++k) {
        if (k + 1 < kMamba3StateRows / 16) {
            load(k + 1);
        }
        Operand<T> results;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&sum)[4] = y[2 * k + i / 2];
            const float2 input = unpack2<T>(inputs[k % 2].r[0][i]);
            float first = fmaf(finisher.D, input.x, sum[i % 2 * 2]);
            float second = fmaf(finisher.D, input.y, sum[i % 2 * 2 + 1]);
            if (kGated) {
                const float2 gate = unpack2<T>(gates[k % 2].r[0][i]);
                first *= silu(gate.x);
                second *= silu(gate.y);
            }
            set_pair<T>(results, i, first, second);
        }
        stmatrix_x4(columns_on(at, k), results.r[0]);
    }
}

// One of two values of this lane and of the one `distance` lanes on, whose sum it gets: the first if `bit` is 0.
__device__ __forceinline__ float exchange_and_add(float first, float second, bool bit, int distance) {
    const float given = __shfl_xor_sync(0xffffffffu, bit ? first : second, distance);
    return (bit ? second : first) + given;
}

// The same with a norm over the block's columns, which are all of the head's. weights: its weights.
template <typename T>
__device__ __forceinline__ void finish_normed_rows(const MambaMamba3& p, const Mamba3Finisher<T>& finisher, float (&y)[8][4],
                                                   const T* x, const float* weights, int lane) {
    T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kMamba3StateRows / 16; ++k) {
        Operand<T> inputs;
        ldmatrix_x4(inputs.r[0], columns_on(x, k));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float(&sum)[4] = y[2 * k + i / 2];
            const int half = i % 2;
            const float2 input = unpack2<T>(inputs.r[0][i]);
            sum[2 * half] = fmaf(finisher.D, input.x, sum[2 * half]);
            sum[2 * half + 1] = fmaf(finisher.D, input.y, sum[2 * half + 1]);
            squares[half] = fmaf(sum[2 * half], sum[2 * half], squares[half]);
            squares[half] = fmaf(sum[2 * half + 1], sum[2 * half + 1], squares[half]);
        }
    }
    float rstd[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 1);
        squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 2);
        rstd[half] = rsqrtf(fmaf(squares[half], 1.0f / static_cast<float>(p.headdim), p.norm_eps));
    }
#pragma unroll
    for (int k = 0; k < kMamba3StateRows / 16; ++k) {
        Operand<T> gates, results;
        if (finisher.has_z) {
            ldmatrix_x4(gates.r[0], columns_on(at, k));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&sum)[4] = y[2 * k + i / 2];
            const int half = i % 2;
            const float2 scale = *reinterpret_cast<const float2*>(weights + 16 * k + i / 2 * 8 + lane % 4 * 2);
            float2 value = make_float2(sum[2 * half] * rstd[half] * scale.x, sum[2 * half + 1] * rstd[half] * scale.y);
            if (finisher.has_z) {
                const float2 gate = unpack2<T>(gates.r[0][i]);
                value = make_float2(value.x * silu(gate.x), value.y * silu(gate.y));
            }
            set_pair<T>(results, i, value.x, value.y);
        }
        __syncwarp();  // all have read z's columns, whose place the results take
        stmatrix_x4(columns_on(at, k), results.r[0]);
    }
}

#endif

}  // namespace mamba
