// Backward through the gate where a lane has all ranks of its steps and columns, as in forward/mimo_multiply.cuh.
#pragma once

#include "mamba3/cuda/backward/gate.cuh"
#include "mamba3/cuda/forward/mimo_block.cuh"
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

// Back through the gate, of a warp: from the gradient of out those of the scan's rows, of z, D and projections.
template <typename T>
struct Mamba3StepsGateBack {
    static constexpr int kRanks = 4;
    T *dz, *dy;  // of the chunk's first row, the warp's first column
    float dD;
    float sums[2][2];  // of columns and pairs of ranks: of mimo_z or mimo_out, and one of the ranks, by the lane

    template <typename Block>
    __device__ __forceinline__ Mamba3StepsGateBack(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                   const Block& block, int64_t first, int row)
        : dD(0.0f) {
        const Mamba3WarpgroupBackward& to = launch.backward;
        const int64_t step = block.range.row * p.seqlen + first;
        dz = static_cast<T*>(to.dz) + step * to.dz_step_stride + block.head * p.headdim + block.row0 + row;
        dy = static_cast<T*>(to.dy) + step * kRanks * to.dy_stride + block.launch_head * p.headdim + block.row0 + row;
        sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f;
    }

    // y: of the warp's columns, all ranks of each step. The words: of v, z and the gradient of out, as ldmatrix_x4_trans
    // gives them. staged: the warp's parts of their places. weights: of the lane's first column. columns: of headdim, from the
    // warp's first one on.
    __device__ __forceinline__ void finish(const Mamba3WarpgroupBackward& to, const float (&y)[8][4],
                                           const uint32_t (&v_words)[4], const uint32_t (&z_words)[4],
                                           const uint32_t (&dout_words)[4], const float4* weights, float D, T* (&staged)[3],
                                           int left, int columns, int lane) {
        uint32_t results[kRanks][4];
        float2 dz_sums[4];
        const bool bits[2] = {(lane & 1) != 0, (lane & 2) != 0};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 rank_v = weights[kMamba3RankV * kMamba3StateRows + 8 * half];
            const float4 rank_z = weights[kMamba3RankZ * kMamba3StateRows + 8 * half];
            const float4 rank_out = weights[kMamba3RankOut * kMamba3StateRows + 8 * half];
            float2 v[2], z[2], dout[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int n = 2 * c + half;
                v[c] = unpack2<T>(v_words[n]);
                z[c] = unpack2<T>(z_words[n]);
                dout[c] = unpack2<T>(dout_words[n]);
                dz_sums[n] = make_float2(0.0f, 0.0f);
            }
            float of_z[kRanks], of_out[kRanks];
#pragma unroll
            for (int k = 0; k < kRanks; ++k) {
                const float by_z = rank_of(rank_z, k), by_out = rank_of(rank_out, k), by_D = D * rank_of(rank_v, k);
                float of_D = 0.0f;
                of_z[k] = of_out[k] = 0.0f;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int n = 2 * c + half;
                    const auto back = [&](float row_of_y, float value, float gate, float given, float& dgate) {
                        const float scan = fmaf(by_D, value, row_of_y);
                        const GateGradients of_gate = gate_backward(given * by_out, scan, gate * by_z);
                        dgate = fmaf(of_gate.dargument, by_z, dgate);
                        of_z[k] = fmaf(of_gate.dargument, gate, of_z[k]);
                        of_out[k] = fmaf(given * scan, of_gate.value, of_out[k]);
                        of_D = fmaf(of_gate.dy, value, of_D);
                        return of_gate.dy;
                    };
                    const float one = back(y[2 * k + c][2 * half], v[c].x, z[c].x, dout[c].x, dz_sums[n].x);
                    const float other = back(y[2 * k + c][2 * half + 1], v[c].y, z[c].y, dout[c].y, dz_sums[n].y);
                    results[k][n] = pack2<T>(one, other);
                }
                dD = fmaf(of_D, rank_of(rank_v, k), dD);
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const float z_sum = exchange_and_add(of_z[2 * pair], of_z[2 * pair + 1], bits[0], 1);
                const float out_sum = exchange_and_add(of_out[2 * pair], of_out[2 * pair + 1], bits[0], 1);
                sums[half][pair] += exchange_and_add(z_sum, out_sum, bits[1], 2);
            }
        }
        // Eight columns of a step a lane; three ranks together, then the last one and z's gradient.
        const int own = opaque(lane), step = own / 2, column = own % 2 * 8;
        const int from = ((step / 8 * 2 + own % 2) * 8 + step % 8) * 8;
        const bool exists = step < left && column < columns;
        T* const dy_at = dy + (static_cast<int64_t>(step * kRanks) * to.dy_stride + column);
        const auto store = [&](T* at, int place) {
            if (exists) {
                *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(staged[place] + from);
            }
        };
        __syncwarp();  // all have read the inputs
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            stmatrix_x4_trans(staged[k] + own * 8, results[k]);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            store(dy_at + k * to.dy_stride, k);
        }
        uint32_t dz_words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            dz_words[n] = pack2<T>(dz_sums[n].x, dz_sums[n].y);
        }
        __syncwarp();
        stmatrix_x4_trans(staged[0] + own * 8, results[3]);
        stmatrix_x4_trans(staged[1] + own * 8, dz_words);
        __syncwarp();
        store(dy_at + 3 * to.dy_stride, 0);
        store(dz + (step * to.dz_step_stride + column), 1);
        dz += kMamba3RankSteps * to.dz_step_stride;
        dy += kMamba3ChunkRows * to.dy_stride;
    }

    // shared: room for a float of each warp.
    template <typename Block>
    __device__ __forceinline__ void store_sums(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                               float* shared, int row, int warp, int lane) const {
        float* const to = lane % 4 / 2 != 0 ? launch.backward.dmimo_out : launch.backward.dmimo_z;
        const int64_t first = (block.sequence * p.nheads + block.head) * kRanks + lane % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = row + lane / 4 + 8 * half;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                if (column < block.columns) {
                    to[(first + 2 * pair) * p.headdim + block.row0 + column] = sums[half][pair];
                }
            }
        }
        store_sum_of_D(launch, block, p.nheads, dD, shared, warp, lane);
    }
};

#endif

}  // namespace mamba
