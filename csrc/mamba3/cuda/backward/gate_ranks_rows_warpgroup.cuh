// gate_back_warpgroup.cuh for four ranks with projections: also the gradients of mimo_z and mimo_out.
#pragma once

#include "mamba3/cuda/backward/gate_warpgroup.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of a warp, which has four steps of a chunk. z comes as for the output, into the rows of the warp's tile from 0 on, and the
// gradient of out into those from 4 on. A lane's rows all have the same rank.
template <typename T>
struct Mamba3RanksGateBack {
    static constexpr int kRanks = 4, kSteps = 16 / kRanks;
    static constexpr int kParts = kMamba3StateRows / 16;  // of the columns, 16 each
    const T* dout;                                        // the lane's piece of it in a chunk
    T *dz, *dy;                                           // the lane's first piece of results
    float dD;
    float dmimo_z[kParts][2], dmimo_out[kParts][2];  // of one of the lane's two columns in each eight

    template <typename Block>
    __device__ __forceinline__ Mamba3RanksGateBack(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                   const Block& block, int warp, int lane)
        : dD(0.0f) {
        const Mamba3WarpgroupBackward& to = launch.backward;
        const int64_t first = block.first_step(launch.chunks) + kSteps * warp, column = lane % 8 * 8;
        const int64_t step = block.range.row * p.seqlen + first, row = lane / 8;
        const int64_t at = block.row0 + (column < block.columns ? column : 0);
        dout = static_cast<const T*>(to.dout) + block.range.row * to.dout_batch_stride + (first + row) * to.dout_len_stride +
               block.head * to.dout_head_stride + at;
        dz = static_cast<T*>(to.dz) + (step + row) * to.dz_step_stride + block.head * p.headdim + at;
        dy = static_cast<T*>(to.dy) + (step * kRanks + row) * to.dy_stride + block.launch_head * p.headdim + at;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            dmimo_z[k][0] = dmimo_z[k][1] = dmimo_out[k][0] = dmimo_out[k][1] = 0.0f;
        }
    }

    template <typename Finisher>
    __device__ __forceinline__ void begin_copies(const Mamba3WarpgroupBackward&, const Finisher& finisher, int) const {
        cp_async<16>(finisher.piece_on(4), dout, finisher.row < finisher.left);
        cp_async_commit_group();
    }

    // y: the warp's rows. x: the address in x's tile for ldmatrix_x4. finisher: of the output, whose z has come. weights: as
    // in finish_rows.
    template <typename Finisher>
    __device__ __forceinline__ void finish(const MambaMamba3& p, const Mamba3WarpgroupBackward& to, const Finisher& finisher,
                                           const float (&y)[8][4], const T* x, const float* weights, int lane) {
        T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
        const T* const z = finisher.own + Mamba3XTile::at(lane % 16 / kRanks, lane / 16 * 8);
        const T* const given = finisher.own + Mamba3XTile::at(kSteps + lane % 16 / kRanks, lane / 16 * 8);
        const float* const gate_weights = weights + (1 + lane / 4 % kRanks) * kMamba3WeightPitch + lane % 4 * 2;
        const bool bits[3] = {(lane & 4) != 0, (lane & 8) != 0, (lane & 16) != 0};
        float dz_sums[kParts][2];  // of a column of the lane's two steps
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            Operand<T> inputs, gates, gradients, results;
            ldmatrix_x4(inputs.r[0], columns_on(x, k));
            ldmatrix_x4(gates.r[0], columns_on(z, k));
            ldmatrix_x4(gradients.r[0], columns_on(given, k));
            float dgate[2][4];  // of a step, four columns
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                const float* const own_weights = gate_weights + 16 * k + 8 * block;
                const float2 of_z = *reinterpret_cast<const float2*>(own_weights);
                const float2 of_out = *reinterpret_cast<const float2*>(own_weights + kRanks * kMamba3WeightPitch);
                float2 sum_z = make_float2(0.0f, 0.0f), sum_out = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = 2 * block + half;
                    const float2 input = unpack2<T>(inputs.r[0][i]), gate = unpack2<T>(gates.r[0][i]);
                    const float2 gradient = unpack2<T>(gradients.r[0][i]);
                    const float* const sum = &y[2 * k + block][2 * half];
                    const auto back = [&](float own, float row, float gate_in, float given_in, float weight, float out_weight,
                                          float& dgate_in, float& weight_sum, float& out_sum) {
                        const float argument = gate_in * weight, part = sigmoid(argument), value = argument * part;
                        const float slope = fmaf(value, 1.0f - part, part), d = given_in * out_weight;
                        const float scan = fmaf(finisher.D, own, row), drow = d * value, dargument = d * scan * slope;
                        dgate_in = dargument * weight;
                        weight_sum = fmaf(dargument, gate_in, weight_sum);
                        out_sum = fmaf(given_in * scan, value, out_sum);
                        dD = fmaf(drow, own, dD);
                        return drow;
                    };
                    const float one =
                        back(input.x, sum[0], gate.x, gradient.x, of_z.x, of_out.x, dgate[half][2 * block], sum_z.x, sum_out.x);
                    const float other = back(input.y, sum[1], gate.y, gradient.y, of_z.y, of_out.y, dgate[half][2 * block + 1],
                                             sum_z.y, sum_out.y);
                    set_pair<T>(results, i, one, other);
                }
                dmimo_z[k][block] += exchange_and_add(sum_z.x, sum_z.y, bits[2], 16);
                dmimo_out[k][block] += exchange_and_add(sum_out.x, sum_out.y, bits[2], 16);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float one = exchange_and_add(dgate[half][0], dgate[half][1], bits[0], 4);
                const float other = exchange_and_add(dgate[half][2], dgate[half][3], bits[0], 4);
                dz_sums[k][half] = exchange_and_add(one, other, bits[1], 8);
            }
            __syncwarp();  // all have read these columns
            stmatrix_x4(columns_on(at, k), results.r[0]);
        }
        __syncwarp();
        finisher.store_pieces(dy, to.dy_stride, kRanks * finisher.left);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = lane / 16 + 2 * half;
                const int column = 16 * k + lane % 4 * 2 + (bits[0] ? 1 : 0) + (bits[1] ? 8 : 0);
                finisher.own[Mamba3XTile::at(step, column)] = from_float<T>(dz_sums[k][half]);
            }
        }
        __syncwarp();
        if (finisher.row < finisher.left) {
            *reinterpret_cast<uint4*>(dz) = *reinterpret_cast<const uint4*>(finisher.piece_on(0));
        }
        __syncwarp();  // z of the next chunk takes the place
        constexpr int kChunkSteps = kMamba3ChunkRows / kRanks;
        dout += kChunkSteps * to.dout_len_stride;
        dz += kChunkSteps * to.dz_step_stride;
        dy += kMamba3ChunkRows * to.dy_stride;
    }

    // sums: room for all of a warpgroup's.
    template <typename Block>
    __device__ __forceinline__ void store_sums(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                               float* sums, int warp, int lane) const {
        constexpr int kEach = 4 * kParts, kWarps = kMamba3Threads / 32;
        static_assert(kEach == 4 * kWarps, "a warp adds up four of them");
        float* const own = sums + warp * (kEach * 32) + lane;
        warpgroup_barrier_sync();  // the tiles have been read
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                own[(2 * k + i) * 32] = dmimo_z[k][i];
                own[(2 * k + i + kEach / 2) * 32] = dmimo_out[k][i];
            }
        }
        warpgroup_barrier_sync();
        const int64_t first = ((block.sequence * p.nheads + block.head) * kRanks + lane / 4 % kRanks) * p.headdim + block.row0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int which = 4 * warp + i, eight = which % (kEach / 2);
            const int column = 8 * eight + lane % 4 * 2 + lane / 16;
            float sum = 0.0f;
#pragma unroll
            for (int from = 0; from < kWarps; ++from) {
                sum += sums[(from * kEach + which) * 32 + lane];
            }
            if (column < block.columns) {
                (which < kEach / 2 ? launch.backward.dmimo_z : launch.backward.dmimo_out)[first + column] = sum;
            }
        }
        store_sum_of_D(launch, block, p.nheads, dD, sums, warp, lane);
    }
};

#endif

}  // namespace mamba
