// The warps of the pipelined forward scan that copy, prepare and finish tiles.
#pragma once

#include "selective_scan/cuda/pipeline_layout.cuh"

namespace mamba {

// A thread's elements: the same four steps of one channel in every tile, and of some states' B and C. Tiles behind the last one
// are as others whose steps do not exist.
template <typename T, class Layout>
struct PipelineElements {
    using Shared = PipelineShared<T, Layout>;
    using Stage = PipelineStage<T, Layout>;
    static constexpr int kVector = Layout::kVector;
    static constexpr int kAhead = Shared::kAhead;
    static constexpr int kCopied = Shared::kStages - 1;  // tiles whose copies have begun when one is scanned

    const MambaSelectiveScan& p;
    Shared& shared;
    const int tiles;
    const int element;  // the thread's number
    const int row;      // the channel's in the block
    const int step;     // in a tile
    const bool row_exists;
    const int64_t channel;
    const T *const u, *const delta, *const z;  // where they lie if the tile begins memory's rows
    T* const out;
    const float bias, D;
    const bool gated, add;
    const T* B[Layout::kOwnPieces];
    const T* C[Layout::kOwnPieces];
    bool state_exists[Layout::kOwnPieces];
    Packed<T, kVector> before = packed_zero<T, kVector>();  // what the results of the tile in hand are added to

    __device__ __forceinline__ PipelineElements(const MambaSelectiveScan& params, const ScanBlock& block, Shared& memory,
                                                int tile_count, int thread)
        : p(params),
          shared(memory),
          tiles(tile_count),
          element(thread),
          row(element / Layout::kRowThreads),
          step(element % Layout::kRowThreads * kVector),
          row_exists(Layout::kMamba || row < block.channels),
          channel(block.first_channel + (row_exists ? row : 0)),
          u(at(static_cast<const T*>(p.u), block.batch * p.u_batch_stride + channel * p.u_dim_stride)),
          delta(at(static_cast<const T*>(p.delta), block.batch * p.delta_batch_stride + channel * p.delta_dim_stride)),
          z(at(static_cast<const T*>(p.z), block.batch * p.z_batch_stride + channel * p.z_dim_stride)),
          out(at(static_cast<T*>(p.out), block.batch * p.out_batch_stride + channel * p.out_dim_stride)),
          bias(p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f),
          D(p.D != nullptr ? p.D[channel] : 0.0f),
          gated(is_gated<Layout>(p)),
          add(adds<Layout>(p)) {
#pragma unroll
        for (int i = 0; i < Layout::kOwnPieces; ++i) {
            const int n = piece(i) / Layout::kRowThreads;
            state_exists[i] = Layout::kMamba || n < p.dstate;
            const int64_t state = state_exists[i] ? n : 0;
            B[i] = at(static_cast<const T*>(p.B),
                      block.batch * p.B_batch_stride + block.group * p.B_group_stride + state * p.B_dstate_stride);
            C[i] = at(static_cast<const T*>(p.C),
                      block.batch * p.C_batch_stride + block.group * p.C_group_stride + state * p.C_dstate_stride);
        }
    }

    template <typename Element>
    __device__ __forceinline__ Element* at(Element* tensor, int64_t from) const {
        return tensor + from + place_in_tile<Layout>(p, step, kVector);
    }
    // The thread's pieces of B and C have the same steps.
    __device__ __forceinline__ int piece(int i) const { return element + i * Layout::kElementThreads; }
    __device__ __forceinline__ bool has_piece(int i) const { return Layout::kEvenPieces || piece(i) < Layout::kPieces; }
    __device__ __forceinline__ bool steps_exist(int tile) const {
        return Layout::kMamba ? tile < tiles : static_cast<int64_t>(tile) * Layout::kTile + step < p.seqlen;
    }
    __device__ __forceinline__ int64_t tile_place(int tile) const {
        return place_of<Layout>(p, static_cast<int64_t>(tile) * Layout::kTile, Layout::kTile);
    }
    __device__ __forceinline__ Packed<T, kVector> read(const T* from) const {
        Packed<T, kVector> packed = packed_load<T, kVector>(from);
        if (is_reverse<Layout>(p)) {
            mirror(packed);
        }
        return packed;
    }

    __device__ __forceinline__ void begin_copies(int tile) {
        Stage& stage = shared.stage(tile);
        const bool in_row = steps_exist(tile);
        const int64_t first = in_row ? tile_place(tile) : 0;
        const bool exist = row_exists && in_row;
        cp_async<Stage::kBytes>(stage.u[element], u + first, exist);
        cp_async<Stage::kBytes>(stage.delta[element], delta + first, exist);
        if (gated) {
            cp_async<Stage::kBytes>(stage.z[element], z + first, exist);
        }
#pragma unroll
        for (int i = 0; i < Layout::kOwnPieces; ++i) {
            if (has_piece(i)) {
                cp_async<Stage::kBytes>(stage.B[piece(i)], B[i] + first, state_exists[i] && in_row);
                cp_async<Stage::kBytes>(stage.C[piece(i)], C[i] + first, state_exists[i] && in_row);
            }
        }
        cp_async_commit_group();
    }

    // dt, dt * u, B and C, once the tile's copies are in.
    __device__ __forceinline__ void prepare(int tile) {
        const Stage& stage = shared.stage(tile);
        PipelineTile<T, Layout>& to = shared.prepared(tile);
        float dt[kVector], x[kVector];
        unpack<T, kVector>(read(stage.delta[element]), dt);
        unpack<T, kVector>(read(stage.u[element]), x);
        time_steps<T>(dt, bias, has_softplus<Layout>(p), row_exists && steps_exist(tile) ? kVector : 0);
        unroll<kVector>([&](int i) { x[i] *= dt[i]; });
        const int place = row * Layout::kRow + step;
        write_row(to.dt + place, dt);
        write_row(to.x + place, x);
#pragma unroll
        for (int i = 0; i < Layout::kOwnPieces; ++i) {
            if (has_piece(i)) {
                to.BC.template put_steps<kVector>(place + i * Layout::kPieceRows * Layout::kRow, read(stage.B[piece(i)]),
                                                  read(stage.C[piece(i)]));
            }
        }
    }

    // The lanes' parts of y become results.
    __device__ __forceinline__ void finish(int tile) {
        const Stage& stage = shared.stage(tile);
        const float* const parts = shared.y[tile % 2] + row * Layout::kLanes * Layout::kRow + step;
        float part[Layout::kLanes][kVector];
        unroll<Layout::kLanes>([&](int k) { read_row(part[k], parts + k * Layout::kRow); });
        float y[kVector], input[kVector], gate[kVector], sum[kVector];
        unpack<T, kVector>(read(stage.u[element]), input);
        if (gated) {
            unpack<T, kVector>(read(stage.z[element]), gate);
        }
        unpack<T, kVector>(before, sum);
        static_assert(Layout::kLanes == 8, "as many as the sum has");
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            y[i] = ((part[0][i] + part[1][i]) + (part[2][i] + part[3][i])) +
                   ((part[4][i] + part[5][i]) + (part[6][i] + part[7][i]));
            y[i] = Layout::kMamba || p.D != nullptr ? fmaf(D, input[i], y[i]) : y[i];
            y[i] = gated ? y[i] * silu(gate[i]) : y[i];
            y[i] = add ? y[i] + sum[i] : y[i];
        }
        if (row_exists && steps_exist(tile)) {
            store_steps<T, kVector>(out + tile_place(tile), kVector, true, is_reverse<Layout>(p), y);
        }
    }

    // prepares_first: which of its two tiles a warp takes first. If all of them read the parts of y at once, right behind the
    // barrier, what the scanning warps read then would wait.
    __device__ __forceinline__ void run(bool prepares_first) {
        for (int tile = 0; tile < kCopied; ++tile) {
            begin_copies(tile);
        }
        cp_async_wait_group<kCopied - kAhead>();
        for (int tile = 0; tile < kAhead; ++tile) {
            prepare(tile);
        }
        __syncthreads();
        for (int tile = 0; tile < tiles; ++tile) {  // the one that is scanned meanwhile
            if (prepares_first) {
                cp_async_wait_group<kCopied - kAhead - 1>();
                prepare(tile + kAhead);
            }
            if (tile > 0) {
                finish(tile - 1);  // whose stage is free then
            }
            if (add && row_exists && steps_exist(tile)) {
                before = read(out + tile_place(tile));
            }
            begin_copies(tile + kCopied);
            if (!prepares_first) {
                cp_async_wait_group<kCopied - kAhead>();
                prepare(tile + kAhead);
            }
            __syncthreads();
        }
        finish(tiles - 1);
    }
};

}  // namespace mamba
