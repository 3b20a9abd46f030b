// What comes behind the scan in forward_warpgroup.cuh: D, norm, gate and output projection of the rows of y in a warpgroup's
// accumulators. A warp's 16 rows are whole steps; the results leave through shared memory, where z was.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of a warp.
template <typename T, bool kOneRank>
struct Mamba3Finisher {
    static constexpr int kNone = 1 << 30;
    const T* z;  // the lane's first piece in a chunk's steps of the warp, if there is z
    T* out;
    int64_t z_stride, out_stride, out_rank_stride;
    T* own;  // the warp's rows of the tile of z and results
    bool has_z;
    int row;    // of the lane's first piece of z and results; kNone where its columns do not exist
    int piece;  // where it is in `own`
    int left;   // steps of the chunk from the warp's first one on, or more
    int ranks_log2, ranks;
    int columns;
    bool reduces;  // to a row a step
    float D;

    template <typename Block>
    __device__ __forceinline__ Mamba3Finisher(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                              T* tile, int warp, int lane)
        : z_stride(p.z_len_stride),
          out_stride(p.out_len_stride),
          out_rank_stride(p.out_rank_stride),
          own(tile + 16 * warp * kMamba3StateRows),
          has_z(p.z != nullptr),
          ranks_log2(launch.ranks_log2),
          ranks(static_cast<int>(p.rank)),
          columns(block.columns),
          reduces(p.mimo_out != nullptr),
          D(p.D != nullptr ? p.D[block.head] : 0.0f) {
        const int64_t first = block.first_step(launch.chunks) + (16 * warp >> ranks_log2);
        left = static_cast<int>(block.range.begin + block.range.seqlen - first);
        const int first_row = lane / 8, column = lane % 8 * 8;
        const int64_t at = block.row0 + column;
        row = opaque(column < columns ? first_row : kNone);
        piece = opaque(Mamba3XTile::at(first_row, column));
        z = static_cast<const T*>(p.z) + block.range.row * p.z_batch_stride + first * p.z_len_stride +
            block.head * p.z_head_stride + first_row * p.z_len_stride + at;
        out = static_cast<T*>(p.out) + block.range.row * p.out_batch_stride + first * p.out_len_stride +
              block.head * p.out_head_stride + (kOneRank ? first_row * p.out_len_stride : 0) + at;
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
                if (kOneRank || i < 16 >> ranks_log2) {
                    from = opaque(from);
                    cp_async<16>(piece_on(i), from, row < left - i);
                    from += 4 * z_stride;
                }
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
    // The results of a chunk, behind __syncwarp().
    __device__ __forceinline__ void store_results() const {
        if (kOneRank) {
            store_pieces(out, out_stride, left);
            return;
        }
        const int rows = reduces ? 16 >> ranks_log2 : 16;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const int own_row = row + i;
            const int step = reduces ? own_row : own_row >> ranks_log2;
            const int rank = reduces ? 0 : own_row & ((1 << ranks_log2) - 1);
            if (own_row < rows && step < left && rank < ranks) {
                *reinterpret_cast<uint4*>(out + step * out_stride + rank * out_rank_stride) =
                    *reinterpret_cast<const uint4*>(piece_on(i));
            }
        }
    }
    __device__ __forceinline__ void next_chunk() {
        const int steps = kOneRank ? kMamba3ChunkRows : kMamba3ChunkRows >> ranks_log2;
        z += steps * z_stride;
        out += steps * out_stride;
        left -= steps;
    }
};

// y: the warp's rows. x: the address in x's tile for ldmatrix_x4. One row a step, without weights or norm. kGated: there is
// z; a branch at each element would keep their special functions apart.
template <bool kGated, typename T, bool kOneRank>
__device__ __forceinline__ void finish_plain_rows(const Mamba3Finisher<T, kOneRank>& finisher, float (&y)[8][4], const T* x,
                                                  int lane) {
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

// The same for four ranks with z and a projection, but no norm, and the results to memory. weights: as below.
template <typename T, bool kOneRank>
__device__ __forceinline__ void finish_four_ranks(const Mamba3Finisher<T, kOneRank>& finisher, const float (&y)[8][4],
                                                  const T* x, const float* weights, int lane) {
    constexpr int kColumns = kMamba3StateRows;
    const int own_lane = opaque(lane);
    const T* const z = finisher.own + Mamba3XTile::at(own_lane % 16 / 4, own_lane / 16 * 8);
    const float* const own_weights = weights + ((1 + own_lane / 4 % 4) * kMamba3WeightPitch + own_lane % 4 * 2);
    const bool bits[2] = {(lane & 4) != 0, (lane & 8) != 0};
    float results[kColumns / 16][2];  // of a column of the lane's two steps
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
        Operand<T> inputs, gates;
        ldmatrix_x4(inputs.r[0], columns_on(x, k));
        ldmatrix_x4(gates.r[0], columns_on(z, k));
        float values[2][4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const float2 of_z = *reinterpret_cast<const float2*>(own_weights + 16 * k + 8 * block);
            const float2 of_out = *reinterpret_cast<const float2*>(own_weights + 16 * k + 8 * block + 4 * kMamba3WeightPitch);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 input = unpack2<T>(inputs.r[0][2 * block + half]), gate = unpack2<T>(gates.r[0][2 * block + half]);
                const float first = fmaf(finisher.D, input.x, y[2 * k + block][2 * half]);
                const float second = fmaf(finisher.D, input.y, y[2 * k + block][2 * half + 1]);
                values[half][2 * block] = first * of_out.x * silu(gate.x * of_z.x);
                values[half][2 * block + 1] = second * of_out.y * silu(gate.y * of_z.y);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float one = exchange_and_add(values[half][0], values[half][1], bits[0], 4);
            const float other = exchange_and_add(values[half][2], values[half][3], bits[0], 4);
            results[k][half] = exchange_and_add(one, other, bits[1], 8);
        }
    }
    __syncwarp();  // all have read z, whose place the results take
    const int own = opaque(Mamba3XTile::at(lane / 16, lane % 4 * 2 + (bits[0] ? 1 : 0) + (bits[1] ? 8 : 0)));
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // two steps on; a row's number is in its pieces' places
            finisher.own[(own ^ (2 * k ^ 2 * half) * 8) + 2 * half * kColumns] = from_float<T>(results[k][half]);
        }
    }
    __syncwarp();
    if (finisher.row < finisher.left) {
        *reinterpret_cast<uint4*>(finisher.out + opaque(lane) / 8 * finisher.out_stride) =
            *reinterpret_cast<const uint4*>(finisher.piece_on(0));
    }
}

// The same for whatever there is. weights: the norm's, mimo_z and mimo_out of each rank, rows of 64.
template <typename T, bool kOneRank>
__device__ __forceinline__ void finish_rows(const MambaMamba3& p, const Mamba3Finisher<T, kOneRank>& finisher, float (&y)[8][4],
                                            const T* x, const float* weights, int lane) {
    constexpr int kColumns = kMamba3StateRows;
    const int log2 = kOneRank ? 0 : finisher.ranks_log2, last_rank = (1 << log2) - 1;
    T* const at = finisher.own + Mamba3XTile::at(lane % 16, lane / 16 * 8);
    const T* const z = finisher.own + Mamba3XTile::at((lane % 16) >> log2, lane / 16 * 8);
    const int pair = lane % 4 * 2;  // columns
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
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
    float rstd[2] = {1.0f, 1.0f};
    if (p.norm_weight != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 1);
            squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 2);
            rstd[half] = rsqrtf(fmaf(squares[half], 1.0f / static_cast<float>(p.headdim), p.norm_eps));
        }
    }
    const float* gate_weights[2];  // of the lane's ranks
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        gate_weights[half] = weights + (1 + ((lane / 4 + 8 * half) & last_rank)) * kMamba3WeightPitch;
    }
    const int to_out_weights = kMamba3WeightPitch << log2;
    const bool bits[3] = {(lane & 4) != 0, (lane & 8) != 0, (lane & 16) != 0};
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
        Operand<T> gates;
        if (finisher.has_z) {
            ldmatrix_x4(gates.r[0], columns_on(z, k));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float(&sum)[4] = y[2 * k + i / 2];
            const int half = i % 2;
            const int column = 16 * k + i / 2 * 8 + pair;
            float2 value = make_float2(sum[2 * half] * rstd[half], sum[2 * half + 1] * rstd[half]);
            if (p.norm_weight != nullptr) {
                const float2 scale = *reinterpret_cast<const float2*>(weights + column);
                value = make_float2(value.x * scale.x, value.y * scale.y);
            }
            if (finisher.has_z) {
                const float2 scale = *reinterpret_cast<const float2*>(gate_weights[half] + column);
                const float2 gate = unpack2<T>(gates.r[0][i]);
                value = make_float2(value.x * silu(gate.x * scale.x), value.y * silu(gate.y * scale.y));
            }
            if (finisher.reduces) {
                const float2 scale = *reinterpret_cast<const float2*>(gate_weights[half] + to_out_weights + column);
                value = make_float2(value.x * scale.x, value.y * scale.y);
            }
            sum[2 * half] = value.x;
            sum[2 * half + 1] = value.y;
        }
        __syncwarp();  // all have read z's columns, whose place the results take
        if (!finisher.reduces || log2 == 0) {
            Operand<T> results;
            a_from_accumulators<T>(results, y[2 * k], y[2 * k + 1]);
            stmatrix_x4(columns_on(at, k), results.r[0]);
            continue;
        }
        // A step's rows are neighbours: lanes that exchange what they have add up a column or two each.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (log2 == 4 && half == 1) {
                continue;
            }
            float left[2], right[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                left[i] = y[2 * k][2 * half + i] + (log2 == 4 ? y[2 * k][2 + i] : 0.0f);
                right[i] = y[2 * k + 1][2 * half + i] + (log2 == 4 ? y[2 * k + 1][2 + i] : 0.0f);
            }
            float one = exchange_and_add(left[0], left[1], bits[0], 4);
            const float other = exchange_and_add(right[0], right[1], bits[0], 4);
            const int step = (lane / 4 + 8 * half) >> log2;
            const int column = 16 * k + pair + (bits[0] ? 1 : 0);
            if (log2 == 1) {
                finisher.own[Mamba3XTile::at(step, column)] = from_float<T>(one);
                finisher.own[Mamba3XTile::at(step, column + 8)] = from_float<T>(other);
                continue;
            }
            one = exchange_and_add(one, other, bits[1], 8);
            if (log2 > 2) {
                one += __shfl_xor_sync(0xffffffffu, one, 16);
            }
            if (log2 == 2 || !bits[2]) {
                finisher.own[Mamba3XTile::at(step, column + (bits[1] ? 8 : 0))] = from_float<T>(one);
            }
        }
    }
}

#endif

}  // namespace mamba
