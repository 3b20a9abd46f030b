// Backward through the gate, of the rows of y in a warpgroup's accumulators: from the gradient of out those of the scan's rows,
// of z and of D. There is one rank, and neither norm nor projections.
#pragma once

#include "mamba3/cuda/finish_warpgroup.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// D's gradient of a block, from that of each lane. sums: room for one of each warp.
template <typename Block>
__device__ __forceinline__ void store_sum_of_D(const Mamba3WarpgroupLaunch& launch, const Block& block, int64_t nheads,
                                               float dD, float* sums, int warp, int lane) {
    float sum = dD;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    meet_warpgroup();  // the tiles have been read
    if (lane == 0) {
        sums[warp] = sum;
    }
    meet_warpgroup();
    if (warp == 0 && lane == 0) {
        launch.backward.dD[(block.sequence * block.row_tiles + block.row_tile) * nheads + block.head] =
            (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

// Of a warp. z comes as for the output.
template <typename T>
struct Mamba3GateBack {
    const T* dout;  // the lane's row of accumulators in a chunk, its first column
    T *dz, *dy;     // the lane's first piece of results
    float dD;

    template <typename Block>
    __device__ __forceinline__ Mamba3GateBack(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                              int warp, int lane)
        : dD(0.0f) {
        const Mamba3WarpgroupBackward& to = launch.backward;
        const int64_t first = block.first_step(launch.chunks) + 16 * warp, column = lane % 8 * 8;
        const int64_t step = block.range.row * p.seqlen + first + lane / 8;
        const int64_t at = block.row0 + (column < block.columns ? column : 0);
        dout = static_cast<const T*>(to.dout) + block.range.row * to.dout_batch_stride +
               (first + lane / 4) * to.dout_len_stride + block.head * to.dout_head_stride + block.row0 + lane % 4 * 2;
        dz = static_cast<T*>(to.dz) + step * to.dz_step_stride + block.head * p.headdim + at;
        dy = static_cast<T*>(to.dy) + step * to.dy_stride + block.launch_head * p.headdim + at;
    }

    // It has no copies but those of z.
    template <typename Finisher>
    __device__ __forceinline__ void begin_copies(const Finisher&) const {}

    // A warp's 16 rows of results, from its tile.
    template <typename Finisher>
    static __device__ __forceinline__ void store(const Finisher& finisher, T* to, int64_t stride) {
        const int rows = finisher.column < finisher.columns ? finisher.left - finisher.row : 0;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            if (i < rows) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(
                    finisher.own + (i % 8 == 0 ? finisher.piece[0] : finisher.piece[1]) + i / 8 * 8 * kMamba3StateRows);
            }
            to += 4 * stride;
        }
    }

    // y: the warp's rows. x: the address in x's tile for load_matrices. finisher: of the output, whose z has come.
    template <typename Finisher>
    __device__ __forceinline__ void finish(const MambaMamba3& p, const Mamba3WarpgroupBackward& to, const Finisher& finisher,
                                           const float (&y)[8][4], const T* x, const float*, int lane) {
        T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
        const T* const from = opaque(dout);
        const bool counts[2] = {lane / 4 < finisher.left, lane / 4 + 8 < finisher.left};
        const int columns = finisher.columns - lane % 4 * 2;
        Operand<T> dys[kMamba3StateRows / 16];
#pragma unroll
        for (int k = 0; k < kMamba3StateRows / 16; ++k) {
            uint32_t gradients[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 16 * k + i / 2 * 8;
                gradients[i] = 0u;
                if (counts[i % 2] && column < columns) {
                    gradients[i] = *reinterpret_cast<const uint32_t*>(from + i % 2 * 8 * to.dout_len_stride + column);
                }
            }
            Operand<T> inputs, gates, results;
            load_matrices(inputs.r[0], columns_on(x, k));
            load_matrices(gates.r[0], columns_on(at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&sum)[4] = y[2 * k + i / 2];
                const float2 input = unpack2<T>(inputs.r[0][i]), gate = unpack2<T>(gates.r[0][i]);
                const float2 gradient = unpack2<T>(gradients[i]);
                float2 dgate, drow;
                const auto back = [&](float own, float row, float gate_in, float given, float& dgate_in, float& drow_in) {
                    const float part = sigmoid(gate_in), value = gate_in * part;
                    const float slope = fmaf(value, 1.0f - part, part);
                    drow_in = given * value;
                    dgate_in = given * fmaf(finisher.D, own, row) * slope;
                    dD = fmaf(drow_in, own, dD);
                };
                back(input.x, sum[i % 2 * 2], gate.x, gradient.x, dgate.x, drow.x);
                back(input.y, sum[i % 2 * 2 + 1], gate.y, gradient.y, dgate.y, drow.y);
                set_pair<T>(results, i, dgate.x, dgate.y);
                set_pair<T>(dys[k], i, drow.x, drow.y);
            }
            store_matrices(columns_on(at, k), results.r[0]);
        }
        __syncwarp();
        store(finisher, opaque(dz), to.dz_step_stride);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kMamba3StateRows / 16; ++k) {
            store_matrices(columns_on(at, k), dys[k].r[0]);
        }
        __syncwarp();
        store(finisher, opaque(dy), to.dy_stride);
        __syncwarp();  // z of the next chunk takes the place
        dout += kMamba3ChunkRows * to.dout_len_stride;
        dz += kMamba3ChunkRows * to.dz_step_stride;
        dy += kMamba3ChunkRows * to.dy_stride;
    }

    // sums: room for one of each warp.
    template <typename Block>
    __device__ __forceinline__ void store_sums(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                               float* sums, int warp, int lane) const {
        store_sum_of_D(launch, block, p.nheads, dD, sums, warp, lane);
    }
};

#endif

}  // namespace mamba
