// Backward through the gate, of the rows of y in a warpgroup's accumulators: from the gradient of out those of the scan's rows,
// of z and of D. There is one rank, and neither norm nor projections.
#pragma once

#include "mamba3/cuda/backward/gate.cuh"
#include "mamba3/cuda/forward/warpgroup_output.cuh"

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
    warpgroup_barrier_sync();  // the tiles have been read
    if (lane == 0) {
        sums[warp] = sum;
    }
    warpgroup_barrier_sync();
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
        const int64_t at = block.row0 + column;
        dout = static_cast<const T*>(to.dout) + block.range.row * to.dout_batch_stride +
               (first + lane / 4) * to.dout_len_stride + block.head * to.dout_head_stride + block.row0 + lane % 4 * 2;
        dz = static_cast<T*>(to.dz) + step * to.dz_step_stride + block.head * p.headdim + at;
        dy = static_cast<T*>(to.dy) + step * to.dy_stride + block.launch_head * p.headdim + at;
    }

    // Asks for a chunk's gradients, long before they are read.
    template <typename Finisher>
    __device__ __forceinline__ void begin_copies(const Mamba3WarpgroupBackward& to, const Finisher& finisher, int lane) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (lane / 4 + 8 * i < finisher.left) {
                prefetch_to_L2(dout + 8 * i * to.dout_len_stride);
            }
        }
    }
    // Of 16 columns of the rows of accumulators.
    template <typename Finisher>
    static __device__ __forceinline__ void load_gradients(uint32_t (&gradients)[4], const T* from, int k, int64_t stride,
                                                          const Finisher& finisher, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * k + i / 2 * 8;
            gradients[i] = 0u;
            if (lane / 4 + i % 2 * 8 < finisher.left && column < finisher.columns - lane % 4 * 2) {
                gradients[i] = *reinterpret_cast<const uint32_t*>(from + i % 2 * 8 * stride + column);
            }
        }
    }

    // y: the warp's rows. x: the address in x's tile for ldmatrix_x4. finisher: of the output, whose z has come.
    template <typename Finisher>
    __device__ __forceinline__ void finish(const MambaMamba3& p, const Mamba3WarpgroupBackward& to, const Finisher& finisher,
                                           const float (&y)[8][4], const T* x, const float*, int lane) {
        T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
        const T* const from = opaque(dout);
        Operand<T> dys[kMamba3StateRows / 16];
        uint32_t gradients[2][4];
        load_gradients(gradients[0], from, 0, to.dout_len_stride, finisher, lane);
#pragma unroll
        for (int k = 0; k < kMamba3StateRows / 16; ++k) {
            if (k + 1 < kMamba3StateRows / 16) {
                load_gradients(gradients[(k + 1) % 2], from, k + 1, to.dout_len_stride, finisher, lane);
            }
            Operand<T> inputs, gates, results;
            ldmatrix_x4(inputs.r[0], columns_on(x, k));
            ldmatrix_x4(gates.r[0], columns_on(at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&sum)[4] = y[2 * k + i / 2];
                const float2 input = unpack2<T>(inputs.r[0][i]), gate = unpack2<T>(gates.r[0][i]);
                const float2 gradient = unpack2<T>(gradients[k % 2][i]);
                float2 dgate, drow;
                const auto back = [&](float own, float row, float argument, float given, float& dgate_in, float& drow_in) {
                    const GateGradients gate_of = gate_backward(given, fmaf(finisher.D, own, row), argument);
                    drow_in = gate_of.dy;
                    dgate_in = gate_of.dargument;
                    dD = fmaf(drow_in, own, dD);
                };
                back(input.x, sum[i % 2 * 2], gate.x, gradient.x, dgate.x, drow.x);
                back(input.y, sum[i % 2 * 2 + 1], gate.y, gradient.y, dgate.y, drow.y);
                set_pair<T>(results, i, dgate.x, dgate.y);
                set_pair<T>(dys[k], i, drow.x, drow.y);
            }
            stmatrix_x4(columns_on(at, k), results.r[0]);
        }
        __syncwarp();
        finisher.store_pieces(dz, to.dz_step_stride, finisher.left);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kMamba3StateRows / 16; ++k) {
            stmatrix_x4(columns_on(at, k), dys[k].r[0]);
        }
        __syncwarp();
        finisher.store_pieces(dy, to.dy_stride, finisher.left);
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
