// The scanning warps of the pipelined forward scan.
#pragma once

#include "selective_scan/cuda/pipeline_layout.cuh"

namespace mamba {

// The scanning warps: a lane's states through a tile, kQuads times four steps after another. While the states take some, what
// does not depend on them is computed for the next, and read for those behind: those of the next tile, if that is prepared.
template <typename T, class Layout>
struct PipelineScan {
    static constexpr int kQuads = Layout::kQuads;
    static constexpr int kTogether = 4 * kQuads;
    static constexpr bool kReadsOn = PipelineShared<T, Layout>::kAhead > 1;
    float h[Layout::kStates];
    float A[Layout::kStates];  // times log2(e)

    struct Inputs {
        Steps4 dt, x, B[Layout::kStates], C[Layout::kStates];
    };
    struct Factors {  // h = decay h + added; y = C h
        Steps4 decay[Layout::kStates], added[Layout::kStates], C[Layout::kStates];
    };
    Factors next[kQuads];   // of the steps to come
    Inputs inputs[kQuads];  // of those behind

    // Where a prepared tile begins for a lane: the dt of its channel, and B of its first state.
    struct Place {
        const float* dt;
        const float* B;

        __device__ __forceinline__ Place(const PipelineTile<T, Layout>& tile, int row, int k)
            : dt(tile.dt + row * Layout::kRow), B(tile.BC.words + k * Layout::kRow) {}
        __device__ __forceinline__ Place(const Place& from, int floats) : dt(from.dt + floats), B(from.B + floats) {}
    };

    __device__ __forceinline__ void read(const Place& at, int step) {
        constexpr int kX = Layout::kChannels * Layout::kRow;  // from dt to x
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
            inputs[q].dt = read4(at.dt + step + 4 * q);
            inputs[q].x = read4(at.dt + kX + step + 4 * q);
            unroll<Layout::kStates>([&](int s) {
                MatrixTile<T, Layout>::read(at.B + s * Layout::kLanes * Layout::kRow + step + 4 * q, inputs[q].B[s],
                                            inputs[q].C[s]);
            });
        }
    }

    __device__ __forceinline__ void prepare() {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                unroll<4>([&](int j) {
                    next[q].decay[s].at[j] = exp2_fast(inputs[q].dt.at[j] * A[s]);
                    next[q].added[s].at[j] = inputs[q].x.at[j] * inputs[q].B[s].at[j];
                });
                next[q].C[s] = inputs[q].C[s];
            }
        }
    }

    // Before the first step of a tile.
    __device__ __forceinline__ void begin(const Place& at) {
        read(at, 0);
        prepare();
        read(at, kTogether);
    }

    // y_row: for the lane's parts of y.
    __device__ __forceinline__ void walk(const Place& tile, const Place& next_tile, float* y_row) {
        if (!kReadsOn) {
            begin(tile);
        }
        constexpr int kRounds = Layout::kTile / kTogether;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int step = round * kTogether;
            Factors now[kQuads];
            unroll<kQuads>([&](int q) { now[q] = next[q]; });
            if (kReadsOn || step + kTogether < Layout::kTile) {
                prepare();
            }
            const int ahead = step + 2 * kTogether;  // read before the stores, which the reads would not pass
            if (ahead < Layout::kTile) {
                read(tile, ahead);
            } else if (kReadsOn) {
                read(next_tile, ahead - Layout::kTile);
            }
            float y[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const Factors& factors = now[i / 4];
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    h[s] = fmaf(factors.decay[s].at[i % 4], h[s], factors.added[s].at[i % 4]);
                    const float C = factors.C[s].at[i % 4];
                    y[i] = s == 0 ? C * h[s] : fmaf(C, h[s], y[i]);
                }
            }
            write_row(y_row + step, y);
        }
    }
};

// What a scanning warp does.
template <typename T, class Layout>
__device__ __forceinline__ void scan_tiles(const MambaSelectiveScan& p, const ScanBlock& block,
                                           PipelineShared<T, Layout>& shared, int tiles, int warp, int lane) {
    const int k = Layout::first_state(lane);
    const int row = warp * Layout::kWarpChannels + Layout::warp_channel(lane);
    // The upper and the lower half of a channel's parts of y change places in every other row, so that lanes which write at the
    // same time meet no other's banks. Their sum stays the same.
    const int y_at = (row * Layout::kLanes + (k ^ row % 2 * 4)) * Layout::kRow;
    const int64_t channel = block.first_channel + row;
    const int64_t state = (block.batch * p.dim + channel) * p.dstate + k;
    bool exists[Layout::kStates];
    PipelineScan<T, Layout> scan;
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        exists[s] = Layout::kMamba || (row < block.channels && k + s * Layout::kLanes < p.dstate);
        scan.A[s] = exists[s] ? decay_exponent(p.A[channel * p.dstate + k + s * Layout::kLanes]) : 0.0f;
        scan.h[s] = exists[s] && p.initial_state != nullptr ? p.initial_state[state + s * Layout::kLanes] : 0.0f;
    }
    float* checkpoint = nullptr;
    if (p.checkpoints != nullptr) {
        const int64_t count = (p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT;
        checkpoint = p.checkpoints + block.batch * count * p.dim * p.dstate + channel * p.dstate + k;
    }
    const int64_t checkpoint_row = checkpoint != nullptr ? p.dim * p.dstate : 0;
    // Between two tiles a scanning warp has nothing to do while it waits for a result or a branch. So places in shared memory
    // walk, and the checkpoint's condition is so short that it takes no branch.
    using Shared = PipelineShared<T, Layout>;
    using Place = typename PipelineScan<T, Layout>::Place;
    constexpr int kTileFloats = sizeof(PipelineTile<T, Layout>) / sizeof(float);
    const Place first(shared.tiles[0], row, k);
    int at = 0;  // the tile, in floats behind the first one
    float* y_row = shared.y[0] + y_at;
    int to_other_y = Layout::kChannels * Layout::kLanes * Layout::kRow;
    __syncthreads();  // the first tiles are prepared
    if (scan.kReadsOn) {
        scan.begin(first);
    }
    for (int tile = 0; tile < tiles; ++tile) {
        const int next = at == (Shared::kTiles - 1) * kTileFloats ? 0 : at + kTileFloats;
        scan.walk(Place(first, at), Place(first, next), y_row);
        at = next;
        y_row += to_other_y;
        to_other_y = -to_other_y;
        if ((tile + 1) % (MAMBA_SCAN_CHECKPOINT / Layout::kTile) == 0) {
            const bool wanted = checkpoint != nullptr && tile + 1 < tiles;
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                if (wanted && exists[s]) {
                    checkpoint[s * Layout::kLanes] = scan.h[s];
                }
            }
            checkpoint += checkpoint_row;
        }
        __syncthreads();
    }
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        if (p.last_state != nullptr && exists[s]) {
            p.last_state[state + s * Layout::kLanes] = scan.h[s];
        }
    }
}

}  // namespace mamba
