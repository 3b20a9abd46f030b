// The roles of the pipelined forward scan's warps, and its shared memory.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

template <ScanCall kCall_, int kScanWarps_, int kTile_, int kQuads_, int kStates_>
struct PipelineLayout {
    static constexpr ScanCall kCall = kCall_;
    static constexpr bool kMamba = kCall == ScanCall::kMamba;
    static constexpr int kLanes = 8;          // lanes that share a channel
    static constexpr int kStates = kStates_;  // states a lane holds: those kLanes apart, see first_state
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

}  // namespace mamba
