// The CUDA forward scan where channels are few: one block on each multiprocessor walks the whole length, so that there is
// nothing to hand on between parts of it, but few warps too, none of which may wait. Some of them scan and do nothing else. The
// others copy, make dt and dt * u, add up y and write the results, of tiles behind and ahead of the one that is scanned.
//
// Between one barrier of the block and the next, tile t is scanned, t - 1 finished, t + 2 prepared (of float32, which takes
// twice the shared memory, t + 1), and the two tiles behind that are on their way. A prepared tile lies in shared memory as in
// forward.cuh.
#pragma once

#include "common/kernel_launch.cuh"
#include "selective_scan/cuda/tile.cuh"

namespace mamba {

template <ScanCall kCall_, int kScanWarps_, int kTile_, int kQuads_>
struct PipelineLayout {
    static constexpr ScanCall kCall = kCall_;
    static constexpr bool kMamba = kCall != ScanCall::kAny;
    static constexpr int kLanes = 8;   // lanes that share a channel
    static constexpr int kStates = 2;  // states a lane holds: those kLanes apart, see first_state
    static constexpr int kSlice = kLanes * kStates;
    static constexpr int kTile = kTile_;
    static constexpr int kRow = kTile + 4;  // floats a row: 16-byte aligned, rows four banks apart
    static constexpr bool kPairs = false;   // B and C lie as float32: unpacking them would take longer
    static constexpr int kQuads = kQuads_;  // how many times four steps a scanning warp works at together
    static constexpr int kScanWarps = kScanWarps_;
    static constexpr int kWarpChannels = 32 / kLanes;
    // Neighbouring lanes share a channel, and lanes two apart a state: 16 bytes that a lane shares with either of them are read
    // in half the turns.
    static __device__ __forceinline__ int first_state(int lane) { return (lane & 1) | (lane >> 1 & 6); }
    static __device__ __forceinline__ int warp_channel(int lane) { return (lane >> 1 & 1) | (lane >> 3 & 2); }
    static constexpr int kChannels = kScanWarps * kWarpChannels;
    // The other warps: a thread has the same four steps of one channel in every tile.
    static constexpr int kVector = 4;
    static constexpr int kRowThreads = kTile / kVector;
    static constexpr int kElementThreads = kChannels * kRowThreads;
    static constexpr int kElementWarps = kElementThreads / 32;
    // A multiprocessor's four schedulers get warps in turn. Three scanning warps, 0 to 2, leave the fourth scheduler to others:
    // 3, 7 and 11 of the six that are 3 to 7 and 11. Those between, 8 to 10, end at once.
    static constexpr int kIdleWarps = kScanWarps == 3 ? 3 : 0;
    static constexpr int kFirstIdle = 8;
    static constexpr int kWarps = kScanWarps + kElementWarps + kIdleWarps;
    // Which of the other warps prepare a tile before they finish one: of three scanning warps' those that share a scheduler
    // with one of them, else every other one.
    static __device__ __forceinline__ bool prepares_first(int warp) { return kScanWarps == 3 ? warp % 4 != 3 : warp % 2 == 1; }
    static constexpr int kThreads = 32 * kWarps;
    // Pieces of B and of C of a tile, four steps of a state each, and how many of them a thread has.
    static constexpr int kPieces = kSlice * kRowThreads;
    static constexpr int kOwnPieces = ceil_div(kPieces, kElementThreads);
    static constexpr int kPieceRows = kElementThreads / kRowThreads;  // between a thread's pieces
    static constexpr bool kEvenPieces = kPieces % kElementThreads == 0;
    static_assert(kElementWarps * 32 == kElementThreads, "whole warps");
    static_assert(kIdleWarps == 0 || kElementWarps == 6, "the idle ones are 8, 9 and 10");
    static_assert(MAMBA_SCAN_CHECKPOINT % kTile == 0, "checkpoints lie at ends of tiles");
};

// A tile as it comes: what threads copy for themselves, and nobody else reads.
template <typename T, class Layout>
struct alignas(16) PipelineStage {
    static constexpr int kBytes = Layout::kVector * static_cast<int>(sizeof(T));  // of a thread's steps
    T u[Layout::kElementThreads][Layout::kVector];
    T delta[Layout::kElementThreads][Layout::kVector];
    T z[Layout::kElementThreads][Layout::kVector];
    T B[Layout::kPieces][Layout::kVector];
    T C[Layout::kPieces][Layout::kVector];
};

// A tile that is prepared.
template <typename T, class Layout>
struct alignas(16) PipelineTile {
    float dt[Layout::kChannels * Layout::kRow];
    float x[Layout::kChannels * Layout::kRow];  // dt * u
    MatrixTile<T, Layout> BC;
};

template <typename T, class Layout>
struct PipelineShared {
    static constexpr int kAhead = pipeline_ahead(sizeof(T));  // tiles that are prepared when one is scanned
    static constexpr int kStages = kAhead + 3;                // on their way, or with u and z still wanted
    PipelineStage<T, Layout> stages[kStages];
    static constexpr int kTiles = kAhead + 1;
    PipelineTile<T, Layout> tiles[kTiles];
    float y[2][Layout::kChannels * Layout::kLanes * Layout::kRow];  // the lanes' parts of it

    __device__ __forceinline__ PipelineStage<T, Layout>& stage(int tile) { return stages[tile % kStages]; }
    __device__ __forceinline__ PipelineTile<T, Layout>& prepared(int tile) { return tiles[tile % kTiles]; }
};

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
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                MatrixTile<T, Layout>::read(at.B + s * Layout::kLanes * Layout::kRow + step + 4 * q, inputs[q].B[s],
                                            inputs[q].C[s]);
            }
        }
    }

    __device__ __forceinline__ void prepare() {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    next[q].decay[s].at[j] = exp2_fast(inputs[q].dt.at[j] * A[s]);
                    next[q].added[s].at[j] = inputs[q].x.at[j] * inputs[q].B[s].at[j];
                }
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
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                now[q] = next[q];
            }
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

// What the other warps do. Tiles behind the last one are as others whose steps do not exist. element: the thread's number.
// prepares_first: which of its two tiles a warp takes first. If all of them read the parts of y at once, right behind the
// barrier, what the scanning warps read then would wait.
template <typename T, class Layout>
__device__ __forceinline__ void pass_tiles(const MambaSelectiveScan& p, const ScanBlock& block,
                                           PipelineShared<T, Layout>& shared, int tiles, int element, bool prepares_first) {
    using Stage = PipelineStage<T, Layout>;
    const int row = element / Layout::kRowThreads;
    const int step = element % Layout::kRowThreads * Layout::kVector;
    const int place = place_in_tile<Layout>(p, step, Layout::kVector);
    const bool row_exists = Layout::kMamba || row < block.channels;
    const int64_t channel = block.first_channel + (row_exists ? row : 0);
    const T* const u = static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride + place;
    const T* const delta =
        static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride + place;
    const T* const z = static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride + place;
    T* const out = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride + place;
    const bool gated = is_gated<Layout>(p);
    const bool skips = Layout::kMamba || p.D != nullptr;
    const bool add = adds<Layout>(p);
    Packed<T, Layout::kVector> before = packed_zero<T, Layout::kVector>();  // what the results of the tile in hand are added to
    const float bias = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
    const float D = p.D != nullptr ? p.D[channel] : 0.0f;
    // The thread's pieces of B and C have the same steps.
    const T* B[Layout::kOwnPieces];
    const T* C[Layout::kOwnPieces];
    bool state_exists[Layout::kOwnPieces];
    const auto piece = [&](int i) { return element + i * Layout::kElementThreads; };
    const auto has_piece = [&](int i) { return Layout::kEvenPieces || piece(i) < Layout::kPieces; };
#pragma unroll
    for (int i = 0; i < Layout::kOwnPieces; ++i) {
        const int n = piece(i) / Layout::kRowThreads;
        state_exists[i] = Layout::kMamba || n < p.dstate;
        const int64_t state = state_exists[i] ? n : 0;
        B[i] = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.group * p.B_group_stride +
               state * p.B_dstate_stride + place;
        C[i] = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.group * p.C_group_stride +
               state * p.C_dstate_stride + place;
    }
    const auto steps_exist = [&](int tile) {
        return Layout::kMamba ? tile < tiles : static_cast<int64_t>(tile) * Layout::kTile + step < p.seqlen;
    };
    const auto first_step = [](int tile) { return static_cast<int64_t>(tile) * Layout::kTile; };
    const auto tile_place = [&](int tile) { return place_of<Layout>(p, first_step(tile), Layout::kTile); };
    const auto read = [&](const T* from) {
        Packed<T, Layout::kVector> packed = packed_load<T, Layout::kVector>(from);
        if (is_reverse<Layout>(p)) {
            mirror(packed);
        }
        return packed;
    };

    const auto begin_copies = [&](int tile) {
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
    };
    const auto prepare = [&](int tile) {
        const Stage& stage = shared.stage(tile);
        PipelineTile<T, Layout>& to = shared.prepared(tile);
        float dt[Layout::kVector], x[Layout::kVector];
        unpack<T, Layout::kVector>(read(stage.delta[element]), dt);
        unpack<T, Layout::kVector>(read(stage.u[element]), x);
        time_steps<T>(dt, bias, has_softplus<Layout>(p), row_exists && steps_exist(tile) ? Layout::kVector : 0);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            x[i] *= dt[i];
        }
        const int at = row * Layout::kRow + step;
        write_row(to.dt + at, dt);
        write_row(to.x + at, x);
#pragma unroll
        for (int i = 0; i < Layout::kOwnPieces; ++i) {
            if (has_piece(i)) {
                to.BC.template put_steps<Layout::kVector>(at + i * Layout::kPieceRows * Layout::kRow, read(stage.B[piece(i)]),
                                                          read(stage.C[piece(i)]));
            }
        }
    };
    const auto finish = [&](int tile) {
        const Stage& stage = shared.stage(tile);
        const float* const parts = shared.y[tile % 2] + row * Layout::kLanes * Layout::kRow + step;
        float part[Layout::kLanes][Layout::kVector];
#pragma unroll
        for (int k = 0; k < Layout::kLanes; ++k) {
            read_row(part[k], parts + k * Layout::kRow);
        }
        float y[Layout::kVector], other[Layout::kVector];
        unpack<T, Layout::kVector>(read(stage.u[element]), other);
        static_assert(Layout::kLanes == 8, "as many as the sum has");
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            y[i] = ((part[0][i] + part[1][i]) + (part[2][i] + part[3][i])) +
                   ((part[4][i] + part[5][i]) + (part[6][i] + part[7][i]));
            y[i] = skips ? fmaf(D, other[i], y[i]) : y[i];
        }
        if (gated) {
            unpack<T, Layout::kVector>(read(stage.z[element]), other);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                y[i] *= silu(other[i]);
            }
        }
        if (add) {
            unpack<T, Layout::kVector>(before, other);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                y[i] += other[i];
            }
        }
        if (row_exists && steps_exist(tile)) {
            store_steps<T, Layout::kVector>(out + tile_place(tile), Layout::kVector, true, is_reverse<Layout>(p), y);
        }
    };

    constexpr int kAhead = PipelineShared<T, Layout>::kAhead;
    constexpr int kCopied = PipelineShared<T, Layout>::kStages - 1;  // tiles whose copies have begun when one is scanned
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

template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1) selective_scan_pipeline_kernel(const MambaSelectiveScan p) {
    MAMBA_DYNAMIC_SHARED(16, unsigned char, pipeline_memory);
    auto& shared = *reinterpret_cast<PipelineShared<T, Layout>*>(pipeline_memory);
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int tiles = static_cast<int>(ceil_div(p.seqlen, Layout::kTile));
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int idle_before = warp < Layout::kFirstIdle ? 0 : Layout::kIdleWarps;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    // The block's barriers are in both branches: all warps that have not ended pass as many of them.
    if (warp < Layout::kScanWarps) {
        scan_tiles(p, block, shared, tiles, warp, lane);
    } else if (idle_before == 0 || warp >= Layout::kFirstIdle + Layout::kIdleWarps) {
        pass_tiles(p, block, shared, tiles, (warp - idle_before - Layout::kScanWarps) * 32 + lane,
                   Layout::prepares_first(warp));
    }
}

template <typename T>
cudaError_t launch_scan_pipeline(const MambaSelectiveScan& p, int kernel) {
    return launch_row<T, kScanPipelineKernels>(scan_pipeline_table, kernel, [&](auto row) {
        constexpr ScanPipelineKernel k = kScanPipelineKernels[decltype(row)::kRow];
        using Layout = PipelineLayout<k.call, k.scan_warps, k.tile, k.quads>;
        constexpr int kShared = sizeof(PipelineShared<T, Layout>);
        static_assert(kShared == pipeline_shared(Layout::kChannels, sizeof(T)) && kShared <= k.shared_bytes &&
                          Layout::kThreads == k.threads,
                      "what the table says");
        const auto pipeline = selective_scan_pipeline_kernel<T, Layout>;
        const cudaError_t error = allow_shared(pipeline, kShared);
        if (error != cudaSuccess) {
            return error;
        }
        return launch_programmatic_dependent(pipeline, scan_grid(p, Layout::kChannels, 1), Layout::kThreads, kShared,
                                             p.run.stream, p);
    });
}

}  // namespace mamba
