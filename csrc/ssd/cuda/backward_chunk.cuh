// The steps of backward.cuh: where a block is, and what its warps do with an item of its walk, a head or a part of its headdim.
#pragma once

#include "ssd/cuda/backward_tile.cuh"

namespace mamba {

// Tiles of an item.
template <typename T, class Layout>
struct ItemTiles {
    using Sizes = ItemSizes<Layout>;
    T* x;
    T* dout;
    T* H;   // the state before the chunk
    T* dH;  // the gradient of the state after it: in H's place, unless the next item's tiles are on their way
};

// A block's shared memory; the items' tiles are as many as backward_shared_bytes says.
template <typename T, class Layout>
struct BackwardTiles {
    static constexpr int kSteps = Layout::kSteps;
    static constexpr int kStride = Layout::kStates + kTilePad;
    static constexpr int kXStride = Layout::kRows + kTilePad;
    static constexpr int kMStride = kSteps + kTilePad;
    alignas(16) T B[kSteps * kStride];
    alignas(16) T C[kSteps * kStride];
    alignas(16) T M[kSteps * kMStride];
    BackwardDecays<kSteps> decays[kDecaysKept];
    BackwardSums<Layout> sums;
    alignas(16) T items[1];

    __device__ __forceinline__ ItemTiles<T, Layout> item(int number, bool ahead) {
        using Sizes = ItemSizes<Layout>;
        T* const x = items + (ahead ? number % 2 : 0) * Sizes::kElementsAhead;
        T* const H = x + 2 * Sizes::kX;
        return {x, x + Sizes::kX, H, ahead ? H + Sizes::kH : H};
    }
};

template <typename T, class Layout>
constexpr int backward_shared_bytes(bool ahead) {
    return static_cast<int>(sizeof(BackwardTiles<T, Layout>)) + item_elements<Layout>(ahead) * static_cast<int>(sizeof(T));
}

// Where a warp's parts of the outputs begin. Where there are more warps than columns, those that begin beyond the last one have
// nothing to multiply.
template <class Layout>
struct BackwardWarp {
    using Pairs = WarpTile<Layout, Layout::kSteps>;  // steps x steps
    using Wide = WarpTile<Layout, Layout::kStates>;  // steps x states
    using Inputs = WarpTile<Layout, Layout::kRows>;  // steps x headdim
    static constexpr int kPairs = 2 * Pairs::kWide;  // accumulators of a lane, fours
    static constexpr int kWide = 2 * Wide::kWide;
    static constexpr int kInputs = 2 * Inputs::kWide;
    int lane, warp;
    int above, beside;  // which 16 steps, as rows of an output; which of its columns
    int step0, pair0, state0, input0;

    __device__ __forceinline__ BackwardWarp() : lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
        above = warp % Pairs::kAbove;
        beside = warp / Pairs::kAbove;
        step0 = 16 * above;
        pair0 = 16 * Pairs::kWide * beside;
        state0 = 16 * Wide::kWide * beside;
        input0 = 16 * Inputs::kWide * beside;
    }
};

struct ChunkItem {
    int64_t head, tile;
    int row0, rows;       // of headdim that exist from row0 on; may be more than the layout's
    int64_t state_index;  // in launch.states
};

template <class Layout>
struct BackwardBlock {
    int64_t split, group, chunk, batch;
    int64_t first;  // step
    int valid;      // steps
    int row_tiles, headdim, dstate;
    int64_t chunks, group_head, first_state;
    int first_item, count;

    __device__ __forceinline__ BackwardBlock(const MambaSsd& p, const BackwardLaunch& launch)
        : row_tiles(static_cast<int>(launch.row_tiles)),
          headdim(static_cast<int>(p.headdim)),
          dstate(static_cast<int>(p.dstate)),
          chunks(launch.chunks) {
        int64_t block = blockIdx.x;
        split = block % launch.splits;
        block /= launch.splits;
        group = block % p.ngroups;
        block /= p.ngroups;
        chunk = block % chunks;
        batch = block / chunks;
        first = chunk * Layout::kSteps;
        valid = steps_in<Layout::kSteps>(p.seqlen, chunk);
        group_head = group * (p.nheads / p.ngroups) + launch.first_head;
        first_state = (batch * p.ngroups + group) * launch.group_heads * chunks + chunk;
        const int64_t items = launch.group_heads * launch.row_tiles;
        first_item = static_cast<int>(items * split / launch.splits);
        count = static_cast<int>(items * (split + 1) / launch.splits) - first_item;
    }
    __device__ __forceinline__ ChunkItem item(int number) const {
        const int slot = (first_item + number) / row_tiles;
        const int tile = (first_item + number) % row_tiles;
        const int row0 = tile * Layout::kRows;
        return {group_head + slot, tile, row0, headdim - row0,
                ((first_state + slot * chunks) * headdim + row0) * static_cast<int64_t>(dstate)};
    }
};

// Starts to load an item's gradient after the chunk.
template <typename T, class Layout>
__device__ __forceinline__ void load_state_after(const ItemTiles<T, Layout>& tiles, const MambaSsd& p,
                                                 const BackwardLaunch& launch, const BackwardBlock<Layout>& block,
                                                 const ChunkItem& item) {
    load_tile<T, Layout::kRows, Layout::kStates, Layout::kThreads>(tiles.dH,
                                                                   static_cast<const T*>(launch.dstates) + item.state_index,
                                                                   p.dstate, item.rows, block.dstate, launch.state_vectors);
}

// Starts to load an item's tiles, the gradient after the chunk where it has a place. All of them are one group of copies, which
// the caller commits: where items are loaded ahead, waiting for all but the last group must not wait for these.
template <typename T, class Layout>
__device__ __forceinline__ void load_item(const ItemTiles<T, Layout>& tiles, const MambaSsdBackward& q,
                                          const BackwardLaunch& launch, const BackwardBlock<Layout>& block,
                                          const ChunkItem& item) {
    const MambaSsd& p = q.forward;
    const T* const x = static_cast<const T*>(p.x) + block.batch * p.x_batch_stride + block.first * p.x_len_stride +
                       item.head * p.x_head_stride + item.row0;
    const T* const dout = static_cast<const T*>(q.dout) + block.batch * q.dout_batch_stride + block.first * q.dout_len_stride +
                          item.head * q.dout_head_stride + item.row0;
    const T* const H = static_cast<const T*>(launch.states) + item.state_index;
    load_tile<T, Layout::kSteps, Layout::kRows, Layout::kThreads>(tiles.x, x, p.x_len_stride, block.valid, item.rows,
                                                                  launch.x_vectors);
    load_tile<T, Layout::kSteps, Layout::kRows, Layout::kThreads>(tiles.dout, dout, q.dout_len_stride, block.valid, item.rows,
                                                                  launch.dout_vectors);
    load_tile<T, Layout::kRows, Layout::kStates, Layout::kThreads>(tiles.H, H, p.dstate, item.rows, block.dstate,
                                                                   launch.state_vectors);
    if (tiles.dH != tiles.H) {
        load_state_after<T, Layout>(tiles, p, launch, block, item);
    }
}

// G = C B^T, once for all heads.
template <typename T, class Layout, int kPairs>
__device__ __forceinline__ void multiply_CB(float (&G)[kPairs][4], const BackwardTiles<T, Layout>& shared,
                                            const BackwardWarp<Layout>& warp) {
    constexpr int kStride = BackwardTiles<T, Layout>::kStride;
    if (warp.pair0 < Layout::kSteps) {
        multiply<T, kPairs / 2, Layout::kStates / 16, false, true>(G, shared.C + warp.step0 * kStride, kStride,
                                                                   shared.B + warp.pair0 * kStride, kStride, warp.lane);
    }
}

// Pairs of steps: f, dG and M.
template <typename T, class Layout, int kPairs>
__device__ __forceinline__ void take_pairs(float (&dG)[kPairs][4], const float (&G)[kPairs][4],
                                           BackwardTiles<T, Layout>& shared, const ItemTiles<T, Layout>& tiles,
                                           const BackwardDecays<Layout::kSteps>& now, const BackwardWarp<Layout>& warp) {
    using Warp = BackwardWarp<Layout>;
    constexpr int kSteps = Layout::kSteps;
    constexpr int kRows = Layout::kRows;
    constexpr int kXStride = BackwardTiles<T, Layout>::kXStride;
    constexpr int kMStride = BackwardTiles<T, Layout>::kMStride;
    float R[kPairs][4];  // dout_t . x_s
    set_to_zero(R);
    if (warp.pair0 < kSteps) {
        multiply<T, Warp::Pairs::kWide, kRows / 16, false, true>(R, tiles.dout + warp.step0 * kXStride, kXStride,
                                                                 tiles.x + warp.pair0 * kXStride, kXStride, warp.lane);
    }
    float2 row_sum = make_float2(0.0f, 0.0f);
    const int t0 = warp.step0 + warp.lane / 4;
    const float cs_above = now.log2_decay[t0];
    const float cs_below = now.log2_decay[t0 + 8];
    const float rest_above = now.log2_rest[t0];
    const float rest_below = now.log2_rest[t0 + 8];
    const int start_above = now.run_start[t0];
    const int start_below = now.run_start[t0 + 8];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const int s = warp.pair0 + 8 * j + warp.lane % 4 * 2;
        if (warp.pair0 + 8 * j < kSteps) {
            float M[4];
            float column_sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = t0 + i / 2 * 8;
                const int column = s + i % 2;
                const float cs = i < 2 ? cs_above : cs_below;
                const bool counts = column <= t && column >= (i < 2 ? start_above : start_below);
                const float rest = (i < 2 ? rest_above : rest_below) - now.log2_rest[column];
                const float decay = counts ? exp2_fast((cs - now.log2_decay[column]) + rest) : 0.0f;
                const float dt = now.dt[column];
                M[i] = decay * G[j][i];
                const float f = M[i] * R[j][i];
                dG[j][i] = fmaf(decay * dt, R[j][i], dG[j][i]);
                // A step's own pair takes no decay. With strong decay it is the largest, and would hide the others.
                const float earlier = column < t ? f : 0.0f;
                if (column == t) {
                    shared.sums.own_pair[t] = f;
                }
                column_sum[i % 2] += earlier;
                if (i < 2) {
                    row_sum.x = fmaf(dt, earlier, row_sum.x);
                } else {
                    row_sum.y = fmaf(dt, earlier, row_sum.y);
                }
            }
            store_pair<T>(shared.M + t0 * kMStride + s, M[0], M[1]);
            store_pair<T>(shared.M + (t0 + 8) * kMStride + s, M[2], M[3]);
            column_sum[0] = add_over_column(column_sum[0]);
            column_sum[1] = add_over_column(column_sum[1]);
            if (warp.lane < 4) {
                shared.sums.column_pairs[warp.above][s] = column_sum[0];
                shared.sums.column_pairs[warp.above][s + 1] = column_sum[1];
            }
        }
    }
    row_sum.x = add_over_row(row_sum.x);
    row_sum.y = add_over_row(row_sum.y);
    if (warp.lane % 4 == 0) {
        shared.sums.row_pairs[warp.beside][t0] = row_sum.x;
        shared.sums.row_pairs[warp.beside][t0 + 8] = row_sum.y;
    }
}

// What the state before the chunk gives: dC += exp(cs_t) H^T dout_t.
template <typename T, class Layout, int kWide>
__device__ __forceinline__ void take_state_before(float (&dC)[kWide][4], BackwardTiles<T, Layout>& shared,
                                                  const ItemTiles<T, Layout>& tiles, const BackwardDecays<Layout::kSteps>& now,
                                                  const BackwardWarp<Layout>& warp) {
    using Tiles = BackwardTiles<T, Layout>;
    const int t = warp.step0 + warp.lane / 4;
    float product[kWide][4];  // H^T dout_t
    set_to_zero(product);
    multiply<T, kWide / 2, Layout::kRows / 16, false, false>(product, tiles.dout + warp.step0 * Tiles::kXStride,
                                                             Tiles::kXStride, tiles.H + warp.state0, Tiles::kStride, warp.lane);
    const float above = now.entering[t];
    const float below = now.entering[t + 8];
    const float2 dot = accumulate<T, kWide / 2>(dC, product, above, below, shared.C + warp.step0 * Tiles::kStride + warp.state0,
                                                Tiles::kStride, warp.lane);
    if (warp.lane % 4 == 0) {
        shared.sums.from_state[warp.beside][t] = above * dot.x;
        shared.sums.from_state[warp.beside][t + 8] = below * dot.y;
    }
}

// du = M^T dout, what the chunk's own outputs give.
template <typename T, class Layout, int kInputs>
__device__ __forceinline__ void multiply_outputs(float (&du)[kInputs][4], const BackwardTiles<T, Layout>& shared,
                                                 const ItemTiles<T, Layout>& tiles, const BackwardWarp<Layout>& warp) {
    using Tiles = BackwardTiles<T, Layout>;
    set_to_zero(du);
    if (warp.input0 < Layout::kRows) {
        multiply<T, kInputs / 2, Layout::kSteps / 16, true, false>(du, shared.M + warp.step0, Tiles::kMStride,
                                                                   tiles.dout + warp.input0, Tiles::kXStride, warp.lane);
    }
}

// What goes into the state after the chunk: du += exp(cs_last - cs_s) dH' B_s, dB += exp(cs_last - cs_s) dt_s dH'^T x_s.
template <typename T, class Layout, int kInputs, int kWide>
__device__ __forceinline__ void take_state_after(float (&du)[kInputs][4], float (&dB)[kWide][4],
                                                 BackwardTiles<T, Layout>& shared, const ItemTiles<T, Layout>& tiles,
                                                 const BackwardDecays<Layout::kSteps>& now, const BackwardWarp<Layout>& warp) {
    using Tiles = BackwardTiles<T, Layout>;
    const int s = warp.step0 + warp.lane / 4;
    const T* const B = shared.B + warp.step0 * Tiles::kStride;
    const float leaving[2] = {now.leaving[s], now.leaving[s + 8]};
    {
        float product[kInputs][4];  // dH' B_s
        set_to_zero(product);
        if (warp.input0 < Layout::kRows) {
            multiply<T, kInputs / 2, Layout::kStates / 16, false, true>(
                product, B, Tiles::kStride, tiles.dH + warp.input0 * Tiles::kStride, Tiles::kStride, warp.lane);
        }
#pragma unroll
        for (int j = 0; j < kInputs; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                du[j][i] = fmaf(leaving[i / 2], product[j][i], du[j][i]);
            }
        }
    }
    float product[kWide][4];  // dH'^T x_s
    set_to_zero(product);
    multiply<T, kWide / 2, Layout::kRows / 16, false, false>(product, tiles.x + warp.step0 * Tiles::kXStride, Tiles::kXStride,
                                                             tiles.dH + warp.state0, Tiles::kStride, warp.lane);
    const float2 dot =
        accumulate<T, kWide / 2>(dB, product, now.adding[s], now.adding[s + 8], B + warp.state0, Tiles::kStride, warp.lane);
    if (warp.lane % 4 == 0) {
        shared.sums.to_state[warp.beside][s] = leaving[0] * dot.x;
        shared.sums.to_state[warp.beside][s + 8] = leaving[1] * dot.y;
    }
}

// H . dH', with H from memory: dH' may have taken its place.
template <typename T, class Layout>
__device__ __forceinline__ void multiply_states(BackwardTiles<T, Layout>& shared, const ItemTiles<T, Layout>& tiles,
                                                const BackwardLaunch& launch, const BackwardBlock<Layout>& block,
                                                const ChunkItem& item, const BackwardWarp<Layout>& warp) {
    constexpr int kVector = 16 / sizeof(T);
    constexpr int kRowVectors = Layout::kStates / kVector;
    const T* const H = static_cast<const T*>(launch.states) + item.state_index;
    float product = 0.0f;
#pragma unroll
    for (int i = threadIdx.x; i < Layout::kRows * kRowVectors; i += Layout::kThreads) {
        const int row = i / kRowVectors;
        const int column = i % kRowVectors * kVector;
        if (row < item.rows && column < block.dstate) {
            product = dot_16<T>(H + static_cast<int64_t>(row) * block.dstate + column,
                                tiles.dH + row * BackwardTiles<T, Layout>::kStride + column,
                                launch.state_vectors ? kVector : block.dstate - column, launch.state_vectors, product);
        }
    }
    product = add_over_column(add_over_row(product));
    if (warp.lane == 0) {
        shared.sums.state_product[warp.warp] = product;
    }
}

// dx = dt du + D dout, to memory.
template <typename T, class Layout, int kInputs>
__device__ __forceinline__ void store_chunk_dx(const MambaSsdBackward& q, const BackwardLaunch& launch,
                                               const BackwardBlock<Layout>& block, const ChunkItem& item,
                                               const float (&du)[kInputs][4], const ItemTiles<T, Layout>& tiles,
                                               const BackwardDecays<Layout::kSteps>& now, const BackwardWarp<Layout>& warp) {
    const MambaSsd& p = q.forward;
    const auto D_at = [&](int column) {
        return p.D != nullptr && column < item.rows ? p.D[item.head * p.D_head_stride + (item.row0 + column) * p.D_dim_stride]
                                                    : 0.0f;
    };
    T* const dx = static_cast<T*>(q.dx) + block.batch * q.dx_batch_stride + block.first * q.dx_len_stride +
                  item.head * q.dx_head_stride + item.row0 + warp.input0;
#pragma unroll
    for (int j = 0; j < kInputs / 2; ++j) {
        const int column0 = warp.input0 + 16 * j;
        float2 D[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int column = column0 + 8 * side + warp.lane % 4 * 2;
            D[side] = make_float2(D_at(column), D_at(column + 1));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = warp.step0 + warp.lane / 4 + 8 * half;
            const float dt = now.dt[s];
            float2 pairs[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int column = column0 + 8 * side + warp.lane % 4 * 2;
                float2 skip = make_float2(0.0f, 0.0f);
                if (column < Layout::kRows) {
                    skip = load_pair<T>(tiles.dout + s * BackwardTiles<T, Layout>::kXStride + column);
                }
                const float(&sum)[4] = du[2 * j + side];
                pairs[side].x = fmaf(dt, sum[2 * half], D[side].x * skip.x);
                pairs[side].y = fmaf(dt, sum[2 * half + 1], D[side].y * skip.y);
            }
            const bool exists = s < block.valid && column0 < Layout::kRows && column0 < item.rows;
            store_row<T>(exists ? dx + s * q.dx_len_stride + 16 * j : nullptr, item.rows - column0, launch.dx_vectors, pairs[0],
                         pairs[1], warp.lane);
        }
    }
}

// Sums of x_t dout_t over parts of the steps; behind the next barrier store_chunk_dD adds them, by one warp.
template <typename T, class Layout>
__device__ __forceinline__ void sum_dD(BackwardTiles<T, Layout>& shared, const ItemTiles<T, Layout>& tiles) {
    constexpr int kStride = BackwardTiles<T, Layout>::kXStride;
    constexpr int kPartSteps = Layout::kSteps / BackwardSums<Layout>::kParts;
    const int column = threadIdx.x % Layout::kRows;
    const int part = threadIdx.x / Layout::kRows;
    float sum = 0.0f;
#pragma unroll
    for (int s = part * kPartSteps; s < (part + 1) * kPartSteps; ++s) {
        sum = fmaf(to_float(tiles.x[s * kStride + column]), to_float(tiles.dout[s * kStride + column]), sum);
    }
    shared.sums.skip[part][column] = sum;
}
template <typename T, class Layout>
__device__ __forceinline__ void store_chunk_dD(const MambaSsd& p, const BackwardLaunch& launch,
                                               const BackwardBlock<Layout>& block, const ChunkItem& item,
                                               const BackwardTiles<T, Layout>& shared, int lane) {
    float* const dD = launch.dD + ((block.batch * launch.chunks + block.chunk) * p.nheads + item.head) * p.headdim + item.row0;
    for (int column = lane; column < Layout::kRows && column < item.rows; column += 32) {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < BackwardSums<Layout>::kParts; ++part) {
            sum += shared.sums.skip[part][column];
        }
        dD[column] = sum;
    }
}

// Through the sum over heads of dG to dB and dC, and these to the workspace. Behind a barrier.
template <typename T, class Layout, int kPairs, int kWide>
__device__ __forceinline__ void finish_chunk(float (&dB)[kWide][4], float (&dC)[kWide][4], const float (&dG)[kPairs][4],
                                             BackwardTiles<T, Layout>& shared, const MambaSsd& p, const BackwardLaunch& launch,
                                             const BackwardBlock<Layout>& block, const BackwardWarp<Layout>& warp) {
    using Tiles = BackwardTiles<T, Layout>;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const int s = warp.pair0 + 8 * j + warp.lane % 4 * 2;
        if (warp.pair0 + 8 * j < Layout::kSteps) {
            T* const row = shared.M + (warp.step0 + warp.lane / 4) * Tiles::kMStride + s;
            store_pair<T>(row, dG[j][0], dG[j][1]);
            store_pair<T>(row + 8 * Tiles::kMStride, dG[j][2], dG[j][3]);
        }
    }
    __syncthreads();
    multiply<T, kWide / 2, Layout::kSteps / 16, false, false>(dC, shared.M + warp.step0 * Tiles::kMStride, Tiles::kMStride,
                                                              shared.B + warp.state0, Tiles::kStride, warp.lane);
    multiply<T, kWide / 2, Layout::kSteps / 16, true, false>(dB, shared.M + warp.step0, Tiles::kMStride, shared.C + warp.state0,
                                                             Tiles::kStride, warp.lane);
    const int64_t row_stride = p.ngroups * p.dstate;
    const int64_t at = ((block.split * p.batch + block.batch) * p.seqlen + block.first + warp.step0) * row_stride +
                       block.group * p.dstate + warp.state0;
    const int rows = block.valid - warp.step0;
    const int columns = block.dstate - warp.state0;
    const bool add = launch.first_head > 0;
    store_sum<kWide / 2>(launch.dC + at, row_stride, dC, rows, columns, add, warp.lane);
    store_sum<kWide / 2>(launch.dB + at, row_stride, dB, rows, columns, add, warp.lane);
}

}  // namespace mamba
