// What a thread of the forward and of the backward scan knows of its block's walk through a part of the length.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

// B and C where they do not vary over time.
template <class Layout>
struct ConstantMatrices {
    bool variable_B;
    bool variable_C;
    Chains<Layout> B, C;
};

template <typename T, class Layout>
struct ScanThread {
    const MambaSelectiveScan& p;
    const bool aligned;
    float* const waiting_states;  // (slices, a lane's chains, kThreads): of sliced layouts, between slices
    const ScanBlock block;
    const LaneOrder<Layout> order;
    const int64_t parameters;           // of the scan: one for each state of a channel
    const int64_t first_parameter;      // of the block
    const int64_t first_chain;          // likewise, of (batch, parameter)
    const int stage_state, stage_step;  // of the thread's first element of a tile of B and C
    const T *const B, *const C;         // where that is if the tile begins memory's rows
    const int32_t* const seq_idx;
    const bool general;  // B or C is constant, or the state may restart: see forward_tile

    // Of the tile in hand.
    int steps = 0;        // that exist
    bool whole = false;   // all of its steps, channels and states exist
    bool inside = false;  // see vectors_within
    StagedTile<T, Layout> B_staged, C_staged;

    __device__ __forceinline__ ScanThread(const MambaSelectiveScan& params, bool is_aligned, float* waiting,
                                          int64_t first_segment)
        : p(params),
          aligned(is_aligned),
          waiting_states(waiting),
          block(scan_block(p, Layout::kChannels, first_segment)),
          order(threadIdx.x % 32),
          parameters(p.dim * p.dstate),
          first_parameter(block.first_channel * p.dstate),
          first_chain(block.batch * parameters + first_parameter),
          stage_state(threadIdx.x * Layout::kStageVector / Layout::kTile),
          stage_step(threadIdx.x * Layout::kStageVector % Layout::kTile),
          B(first_of(p.B, p.B_batch_stride, p.B_group_stride, p.B_dstate_stride)),
          C(first_of(p.C, p.C_batch_stride, p.C_group_stride, p.C_dstate_stride)),
          seq_idx(!Layout::kMamba && p.seq_idx != nullptr ? p.seq_idx + block.batch * p.seqlen : nullptr),
          general(!Layout::kMamba && (!p.variable_B || !p.variable_C || seq_idx != nullptr)) {}

    __device__ __forceinline__ const T* first_of(const void* matrix, int64_t batch_stride, int64_t group_stride,
                                                 int64_t dstate_stride) const {
        return static_cast<const T*>(matrix) + block.batch * batch_stride + block.group * group_stride +
               stage_state * dstate_stride + place_in_tile<Layout>(p, stage_step, Layout::kStageVector);
    }
    __device__ __forceinline__ int slices() const {
        return Layout::kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    }
    // The lane's channel in the block's tiles.
    __device__ __forceinline__ int row(int c) const { return threadIdx.x / 32 * Layout::kWarpChannels + order.channel(c); }

    // Calls function(c, s, whether the chain exists, its parameter's number among the block's) for the lane's chains of a
    // slice.
    template <class Function>
    __device__ __forceinline__ void for_chains(int slice, const Function& function) const {
        for_each_chain<Layout>([&](int c, int s) {
            const int n = slice * Layout::kSlice + order.state(s);
            const bool exists = Layout::kMamba || (row(c) < block.channels && n < p.dstate);
            function(c, s, exists, row(c) * static_cast<int>(p.dstate) + n);
        });
    }

    // Between slices chains wait in shared memory.
    __device__ __forceinline__ float& waiting(int slice, int c, int s) const {
        return waiting_states[((slice * Layout::kEach + c) * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
    }
    __device__ __forceinline__ void put_away(const Chains<Layout>& chains, int slice) const {
        if (Layout::kSliced) {
            for_each_chain<Layout>([&](int c, int s) { waiting(slice, c, s) = chains[c][s]; });
        }
    }
    __device__ __forceinline__ void take_back(Chains<Layout>& chains, int slice) const {
        if (Layout::kSliced) {
            for_each_chain<Layout>([&](int c, int s) { chains[c][s] = waiting(slice, c, s); });
        }
    }

    __device__ __forceinline__ void load_A(Chains<Layout>& A, int slice) const {
        for_chains(slice, [&](int c, int s, bool exists, int parameter) {
            A[c][s] = exists ? decay_exponent(p.A[first_parameter + parameter]) : 0.0f;
        });
    }
    __device__ __forceinline__ void load_constants(ConstantMatrices<Layout>& constants, int slice) const {
        constants.variable_B = p.variable_B;
        constants.variable_C = p.variable_C;
        for_chains(slice, [&](int c, int s, bool exists, int parameter) {
            const int64_t at = first_parameter + parameter;
            constants.B[c][s] = exists && !p.variable_B ? static_cast<const float*>(p.B)[at] : 0.0f;
            constants.C[c][s] = exists && !p.variable_C ? static_cast<const float*>(p.C)[at] : 0.0f;
        });
    }

    // Takes states through what `count` segments pass on: segment, segment + step, ... Reads of several are under way at once.
    __device__ __forceinline__ void pass_through_segments(Chains<Layout>& carry, int slice, int64_t segment, int step,
                                                          int count) const {
        constexpr int kAtOnce = 16 / Layout::kStates;
        int64_t state[Layout::kEach][Layout::kStates];
        bool state_exists[Layout::kEach][Layout::kStates];
        for_chains(slice, [&](int c, int s, bool exists, int parameter) {
            state_exists[c][s] = exists;
            state[c][s] = first_chain + parameter;
        });
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            for (int first = 0; first < count; first += kAtOnce) {
                float value[kAtOnce][Layout::kStates], factor[kAtOnce][Layout::kStates];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                    for (int s = 0; s < Layout::kStates; ++s) {
                        const int64_t from = workspace_at(p, segment + (first + i) * step, state[c][s]);
                        const bool exists = first + i < count && state_exists[c][s];
                        value[i][s] = exists ? p.workspace[from] : 0.0f;
                        factor[i][s] = exists ? p.workspace[from + p.batch * parameters] : 1.0f;
                    }
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                    for (int s = 0; s < Layout::kStates; ++s) {
                        // A carry of zero passes zero on even where the factor has overflowed, as it would step by step.
                        const bool fresh = factor[i][s] < 0.0f || carry[c][s] == 0.0f;
                        carry[c][s] = fresh ? value[i][s] : fmaf(factor[i][s], carry[c][s], value[i][s]);
                    }
                }
            }
        }
    }
    // What the block's segment passes on; see workspace_at.
    __device__ __forceinline__ void store_carry(const Chains<Layout>& carry, const Chains<Layout>& A,
                                                const float (&dt_sum)[Layout::kEach], bool restarted, int slice) const {
        for_chains(slice, [&](int c, int s, bool exists, int parameter) {
            if (exists) {
                const int64_t at = workspace_at(p, block.segment, first_chain + parameter);
                p.workspace[at] = carry[c][s];
                p.workspace[at + p.batch * parameters] = restarted ? -1.0f : exp2_fast(A[c][s] * dt_sum[c]);
            }
        });
    }

    // neighbours: see vectors_within.
    __device__ __forceinline__ void begin_tile(int64_t first_step, bool neighbours) {
        const int64_t left = block.end - first_step;
        steps = Layout::kMamba || left > Layout::kTile ? Layout::kTile : static_cast<int>(left);
        whole = steps == Layout::kTile && block.channels == Layout::kChannels && p.dstate % Layout::kSlice == 0;
        inside = vectors_within<Layout>(first_step, p.seqlen, neighbours);
    }
    template <class Function>
    __device__ __forceinline__ void with_tile_access(const Function& function) const {
        with_access<Layout>(aligned, whole, inside, function);
    }
    // A slice of B and C; one that does not vary over time, or is not wanted, is zero.
    template <Access kAccess>
    __device__ __forceinline__ void fetch_matrices(int slice, int64_t first_step, bool want_B = true, bool want_C = true) {
        const int first_state = slice * Layout::kSlice;
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        const auto exists = [&](int pass) {
            return Layout::kMamba || stage_state + pass * kStageStates<Layout> < static_cast<int>(p.dstate) - first_state;
        };
        const auto fetch = [&](StagedTile<T, Layout>& to, bool wanted, const T* from, int64_t dstate_stride) {
            if (wanted) {
                to.template fetch<kAccess>(from + first_state * dstate_stride + place, dstate_stride, steps - stage_step,
                                           is_reverse<Layout>(p), exists);
            } else {
                to.clear();
            }
        };
        fetch(B_staged, want_B && (Layout::kMamba || p.variable_B), B, p.B_dstate_stride);
        fetch(C_staged, want_C && (Layout::kMamba || p.variable_C), C, p.C_dstate_stride);
    }
    __device__ __forceinline__ void fetch_next_slice(int slice, int64_t first_step, bool want_B = true, bool want_C = true) {
        if (Layout::kSliced && slice + 1 < slices()) {
            with_tile_access(
                [&](auto access) { fetch_matrices<decltype(access)::kAccess>(slice + 1, first_step, want_B, want_C); });
        }
    }

    // B and C of a slice to shared memory, by put(), and with them the tile's steps before which states restart.
    template <class Put>
    __device__ __forceinline__ void stage_matrices(int* resets, int64_t first_step, const Put& put) {
        if (is_reverse<Layout>(p)) {
            B_staged.mirror();
            C_staged.mirror();
        }
        __syncthreads();  // what was there has been read
        put();
        if (seq_idx != nullptr) {
            for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
                const int64_t step = first_step + i;
                resets[i] = step > 0 && step < p.seqlen &&
                            seq_idx[place_of<Layout>(p, step, 1)] != seq_idx[place_of<Layout>(p, step - 1, 1)];
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ void clear_resets(int* resets) const {
        if (general && seq_idx == nullptr) {
            for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
                resets[i] = 0;
            }
        }
    }
};

}  // namespace mamba
