// The backward scan of channels that have few states, see few_states.cuh; backward.cuh has the formulas.
//
// A warp takes kPairs pairs of channels of a tile, one after the other, from the last tile to the first, and adds up their dB
// and dC in shared memory, its even lanes dB and the odd ones dC; behind each tile the block adds up its warps'.
#pragma once

#include "selective_scan/cuda/few_states.cuh"
#include "selective_scan/parts.h"

namespace mamba {

// A lane's steps of a channel, and what is found of them for one state after the other.
struct FewStatesSteps {
    float u[kLaneSteps], dt[kLaneSteps], dy[kLaneSteps];
    float g[kLaneSteps];   // sums over states of B times the gradient of the state
    float wh[kLaneSteps];  // and of the exponent times that of the decay's logarithm
    float decay[kLaneSteps];
    float h[kLaneSteps + 1];  // the states before the steps, and after the last one

    // Returns the lane's dD.
    __device__ __forceinline__ float begin() {
        float dD = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            u[i] = opaque_value(u[i]);  // unpacked
            dy[i] = opaque_value(dy[i]);
            dD = fmaf(dy[i], u[i], dD);
            g[i] = wh[i] = 0.0f;
        }
        return dD;
    }

    __device__ __forceinline__ void find_states(const LaneCrossing<false>& crossing, const float (&B)[kLaneSteps],
                                                float exponent, float carry) {
        float end = crossing.begin(carry);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            decay[i] = exp2_fast(exponent * dt[i]);
            h[i + 1] = dt[i] * u[i] * B[i];
            end = fmaf(decay[i], end, h[i + 1]);
        }
        h[0] = crossing.reach(crossing.pass(end, exponent), carry);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            h[i + 1] = fmaf(decay[i], h[i], h[i + 1]);
        }
    }

    // What a lane passes back of what is passed back to the tile's last step.
    __device__ __forceinline__ float pass_back(const LaneCrossing<true>& crossing, const float (&C)[kLaneSteps], float exponent,
                                               float carry) const {
        float w = crossing.begin(carry);
#pragma unroll
        for (int i = kLaneSteps - 1; i >= 0; --i) {
            w = decay[i] * fmaf(C[i], dy[i], w);
        }
        return crossing.pass(w, exponent);
    }

    // w: what is passed back to the last step. B and C become their gradients; returns the lane's dA.
    __device__ __forceinline__ float go_back(float (&B)[kLaneSteps], float (&C)[kLaneSteps], float exponent, float w) {
        float dA = 0.0f;
#pragma unroll
        for (int i = kLaneSteps - 1; i >= 0; --i) {
            const float dh = fmaf(C[i], dy[i], w);
            C[i] = dy[i] * h[i + 1];
            w = decay[i] * dh;
            const float dlog = w * h[i];
            dA = fmaf(dt[i], dlog, dA);
            wh[i] = fmaf(exponent, dlog, wh[i]);
            g[i] = fmaf(B[i], dh, g[i]);
            B[i] = dt[i] * u[i] * dh;
        }
        return dA;
    }

    // The gradients of u, in the place of dy, and of delta, in that of g; returns the lane's of delta_bias. raw: delta.
    __device__ __forceinline__ float finish(const float (&raw)[kLaneSteps], float bias, float skip, bool softplus, int count) {
        float dbias = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            dy[i] = fmaf(dt[i], g[i], skip * dy[i]);
            g[i] = fmaf(u[i], g[i], kLn2 * wh[i]);
            g[i] *= softplus ? sigmoid(raw[i] + bias) : 1.0f;
            dbias += i < count ? g[i] : 0.0f;
        }
        return dbias;
    }
};

template <typename T, int kWarps, int kPairs>
struct FewStatesBackwardShared {
    WaitingSteps<T, 32 * kWarps> u, delta, dout;
    WaitingMatrices<T> waiting;
    // A warp's dB and dC of a state: four steps of each lane, then the other four, in banks of their own for add_up.
    float matrices[kWarps][kMostFewStates][2][128 + 4];
    // Each lane's sums of a channel.
    float dA[kPairs][kMostFewStates][32 * kWarps], dD[kPairs][32 * kWarps], ddelta_bias[kPairs][32 * kWarps];
    float4 y[2][32 * kWarps];  // of a lane's steps

    // A warp's dB and dC of a lane's steps: are the first ones, or are added.
    static __device__ __forceinline__ void put(float (&of_state)[2][128 + 4], const float (&sums)[kLaneSteps], bool first) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4* const at = reinterpret_cast<float4*>(of_state[i]) + threadIdx.x % 32;
            const float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *at;
            *at = make_float4(before.x + sums[4 * i], before.y + sums[4 * i + 1], before.z + sums[4 * i + 2],
                              before.w + sums[4 * i + 3]);
        }
    }

    // Adds what a state gives to y, the first one to what D gives.
    __device__ __forceinline__ void add_y(const FewStatesSteps& at, const float (&C)[kLaneSteps], float skip, bool first) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4& sum = y[i][threadIdx.x];
            const auto add = [&](float before, int j) { return fmaf(C[j], at.h[j + 1], first ? skip * at.u[j] : before); };
            sum = make_float4(add(sum.x, 4 * i), add(sum.y, 4 * i + 1), add(sum.z, 4 * i + 2), add(sum.w, 4 * i + 3));
        }
    }
    template <class Steps>
    __device__ __forceinline__ void store_y(T* at, const Steps& steps, int count, bool add) const {
        const float4 low = y[0][threadIdx.x], high = y[1][threadIdx.x];
        float values[kLaneSteps] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (add) {
            steps.add(static_cast<const T*>(at), count, values);
        }
        steps.store(at, count, values);
    }

    // Adds a tile's dB and dC of the block's first `warps` warps to those of the group, or is the first to write them. at:
    // where the group's begin.
    __device__ __forceinline__ void add_up(const ScanBackward& q, int warps, int first_step, int64_t at, bool atomic) const {
        const MambaSelectiveScan& p = q.forward;
        for (int i = threadIdx.x; i < 2 * kFewStatesTile * static_cast<int>(p.dstate); i += 32 * kWarps) {
            const int in_tile = i % kFewStatesTile, state = i / (2 * kFewStatesTile), of_C = i / kFewStatesTile % 2;
            const int step = first_step + in_tile;
            if (step < p.seqlen) {
                const int from = in_tile / kLaneSteps * 8 + of_C * 4 + in_tile % 4, part = in_tile / 4 % 2;
                float sum = matrices[0][state][part][from];
#pragma unroll 1
                for (int warp = 1; warp < warps; ++warp) {
                    sum += matrices[warp][state][part][from];
                }
                float* const to = (of_C != 0 ? q.parts.dC : q.parts.dB) + at + state * p.seqlen +
                                  (p.reverse != 0 ? p.seqlen - 1 - step : step);
                if (atomic) {
                    atomicAdd(to, sum);
                } else {
                    *to = sum;
                }
            }
        }
    }
};

// The gradients of a pair of channels' B and C, added up: of B in even lanes, of C in odd ones.
__device__ __forceinline__ void sum_pair(float (&dB)[kLaneSteps], const float (&dC)[kLaneSteps]) {
    const bool odd = channel_of_warp() != 0;
#pragma unroll
    for (int i = 0; i < kLaneSteps; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, odd ? dB[i] : dC[i], 1);
        dB[i] = (odd ? dC[i] : dB[i]) + other;
    }
}

// What a warp knows of its channels: lane n + states * c has those of channel c's state n, or lane c of channel c.
struct FewStatesChannels {
    int64_t first;
    int count;  // of those that exist
    bool has_state;
    int64_t own_state;   // in (B, D, N)
    int from, own_step;  // the lane that leaves the own state's gradient, and when: at c * states + n
    float exponents, carries, biases, skips;

    __device__ __forceinline__ FewStatesChannels(const ScanBackward& q, const ScanBlock& block, int each) {
        const MambaSelectiveScan& p = q.forward;
        const int lane = threadIdx.x % 32, before = threadIdx.x / 32 * each, states = static_cast<int>(p.dstate);
        first = block.first_channel + before;
        count = block.channels - before < each ? block.channels - before : each;
        has_state = lane < count * states;
        from = opaque(lane / states % 2);
        own_step = opaque(lane / (2 * states) * 2 * states + lane % states);
        own_state = (block.batch * p.dim + first) * states + lane;
        exponents = has_state ? decay_exponent(p.A[first * states + lane]) : 0.0f;
        carries = has_state && q.dlast_state != nullptr ? q.dlast_state[own_state] : 0.0f;
        biases = lane < count && p.delta_bias != nullptr ? p.delta_bias[first + lane] : 0.0f;
        skips = lane < count && p.D != nullptr ? p.D[first + lane] : 0.0f;
    }

    // The states before a tile.
    __device__ __forceinline__ float states_before(const ScanBackward& q, const ScanBlock& block, int tile_first) const {
        const MambaSelectiveScan& p = q.forward;
        const float* from = p.initial_state;
        int64_t place = own_state;
        if (tile_first > 0) {
            const int64_t index =
                tile_first / MAMBA_SCAN_CHECKPOINT - 1 + block.batch * ((p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT - 1);
            from = p.checkpoints;
            place += index * p.dim * p.dstate;
        }
        return from != nullptr && has_state && tile_first >= 0 ? from[place] : 0.0f;
    }
};

template <RowAccess kAccess, typename T, int kPairs, class Shared>
__device__ __forceinline__ void scan_few_states_back(const ScanBackward& q, const ScanBlock& block, FewStatesChannels& channels,
                                                     Shared& shared, bool atomic) {
    const MambaSelectiveScan& p = q.forward;
    const LaneSteps<kAccess> steps(p);
    const int warp = threadIdx.x / 32, odd = channel_of_warp(), states = static_cast<int>(p.dstate);
    const int64_t slot = q.slots > 1 ? block.index : 0;
    const int64_t matrix = ((slot * p.batch + block.batch) * p.ngroups + block.group) * states * p.seqlen;  // in dB, dC

    int first = (static_cast<int>(p.seqlen) - 1) / kFewStatesTile * kFewStatesTile;
    const auto row = [&](auto* data, int64_t batch_stride, int64_t stride) {
        return lane_row(data, block.batch, batch_stride, channels.first + odd, stride, steps.place(first));
    };
    // From a pair of channels to the next one, or from the last one to the first of the tile before.
    const auto move = [&](auto*& at, int64_t stride, bool last) {
        at = opaque(at + (last ? 2 * (1 - kPairs) * stride - steps.to_next_tile() : 2 * stride));
    };
    const T* u_at = row(static_cast<const T*>(p.u), p.u_batch_stride, p.u_dim_stride);
    const T* delta_at = row(static_cast<const T*>(p.delta), p.delta_batch_stride, p.delta_dim_stride);
    const T* dout_at = row(static_cast<const T*>(q.dout), q.dout_batch_stride, q.dout_dim_stride);
    T* du_at = row(static_cast<T*>(q.du), q.du_batch_stride, q.du_dim_stride);
    T* ddelta_at = row(static_cast<T*>(q.ddelta), q.ddelta_batch_stride, q.ddelta_dim_stride);
    T* out_at = p.out != nullptr ? row(static_cast<T*>(p.out), p.out_batch_stride, p.out_dim_stride) : nullptr;

    int tile_count = steps.count(first), count = odd < channels.count ? tile_count : 0;
    const auto fetch_rows = [&](int row_count) {
        shared.u.fetch(threadIdx.x, steps, u_at, row_count);
        shared.delta.fetch(threadIdx.x, steps, delta_at, row_count);
        shared.dout.fetch(threadIdx.x, steps, dout_at, row_count);
    };
    GroupRows<T, kAccess> matrices(p, block, steps.place(first));
    int stage = 0;
    fetch_rows(count);
    matrices.fetch(shared.waiting, stage, steps, first, -steps.to_next_tile());
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    float starts = channels.states_before(q, block, first);
    for (; first >= 0; first -= kFewStatesTile) {
        const float next_starts = channels.states_before(q, block, first - kFewStatesTile);
        const int next_tile_count = steps.count(first - kFewStatesTile);
        matrices.fetch(shared.waiting, 1 - stage, steps, first - kFewStatesTile, -steps.to_next_tile());
#pragma unroll 1
        for (int c = 0; c < 2 * kPairs; c += 2) {
            const bool last_pair = c + 2 == 2 * kPairs;
            const float bias = __shfl_sync(kAllLanes, channels.biases, c + odd);
            const float skip = __shfl_sync(kAllLanes, channels.skips, c + odd);
            FewStatesSteps at;
            cp_async_wait_group<0>();
            const Packed<T, kLaneSteps> delta = shared.delta.read(threadIdx.x);
            steps.template unpack_steps<T>(shared.u.read(threadIdx.x), at.u);
            steps.template unpack_steps<T>(delta, at.dt);
            steps.template unpack_steps<T>(shared.dout.read(threadIdx.x), at.dy);
            move(u_at, p.u_dim_stride, last_pair);
            move(delta_at, p.delta_dim_stride, last_pair);
            move(dout_at, q.dout_dim_stride, last_pair);
            const bool next_exists = (last_pair ? 0 : c + 2) + odd < channels.count;
            const int next_count = !next_exists ? 0 : last_pair ? next_tile_count : tile_count;
            fetch_rows(next_count);
            cp_async_commit_group();
            time_steps<T>(at.dt, bias, p.delta_softplus != 0, count);
            shared.dD[c / 2][threadIdx.x] += at.begin();
            const LaneCrossing<false> crossing(at.dt);
            const LaneCrossing<true> back(at.dt);
#pragma unroll 1
            for (int n = 0; n < states; ++n) {
                float B[kLaneSteps], C[kLaneSteps];
                steps.template unpack_steps<T>(shared.waiting.B[stage][n].read(channel_lane()), B);
                steps.template unpack_steps<T>(shared.waiting.C[stage][n].read(channel_lane()), C);
                const int from = (c + odd) * states + n;
                const float exponent = __shfl_sync(kAllLanes, channels.exponents, from);
                const float carry = __shfl_sync(kAllLanes, channels.carries, from);
                at.find_states(crossing, B, exponent, __shfl_sync(kAllLanes, starts, from));
                if (p.out != nullptr) {
                    shared.add_y(at, C, skip, n == 0);
                }
                const float passed = at.pass_back(back, C, exponent, carry);
                const float end = __shfl_sync(kAllLanes, passed, channels.from);
                channels.carries = channels.own_step == c * states + n ? end : channels.carries;
                shared.dA[c / 2][n][threadIdx.x] += at.go_back(B, C, exponent, back.reach(passed, carry));
                sum_pair(B, C);
                shared.put(shared.matrices[warp][n], B, c == 0);
            }
            float raw[kLaneSteps];
            steps.template unpack_steps<T>(delta, raw);
            shared.ddelta_bias[c / 2][threadIdx.x] += at.finish(raw, bias, skip, p.delta_softplus != 0, count);
            steps.store(du_at, count, at.dy);
            steps.store(ddelta_at, count, at.g);
            move(du_at, q.du_dim_stride, last_pair);
            move(ddelta_at, q.ddelta_dim_stride, last_pair);
            if (p.out != nullptr) {
                shared.store_y(out_at, steps, count, p.add != 0);
                move(out_at, p.out_dim_stride, last_pair);
            }
            count = next_count;
        }
        cp_async_wait_group<0>();
        __syncthreads();
        shared.add_up(q, (block.channels + 2 * kPairs - 1) / (2 * kPairs), first, matrix, atomic);
        __syncthreads();  // before the next tile's
        starts = next_starts;
        tile_count = next_tile_count;
        stage = 1 - stage;
    }
}

template <typename T, int kWarps, int kPairs, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    selective_scan_few_states_backward_kernel(const ScanBackward q, bool quads, bool atomic) {
    static_assert(kWarps >= kMostFewStates, "a warp fetches a state's B and C");
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared_memory);
    auto& shared = *reinterpret_cast<FewStatesBackwardShared<T, kWarps, kPairs>*>(shared_memory);
    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = few_states_block(p, 2 * kPairs * kWarps);
    FewStatesChannels channels(q, block, 2 * kPairs);
    const int states = static_cast<int>(p.dstate);
#pragma unroll 1
    for (int c = 0; c < kPairs; ++c) {
#pragma unroll 1
        for (int n = 0; n < states; ++n) {
            shared.dA[c][n][threadIdx.x] = 0.0f;
        }
        shared.dD[c][threadIdx.x] = shared.ddelta_bias[c][threadIdx.x] = 0.0f;
    }
    if (!quads) {
        scan_few_states_back<RowAccess::kElements, T, kPairs>(q, block, channels, shared, atomic);
    } else if (p.reverse != 0) {
        scan_few_states_back<RowAccess::kQuadsReverse, T, kPairs>(q, block, channels, shared, atomic);
    } else {
        scan_few_states_back<RowAccess::kQuads, T, kPairs>(q, block, channels, shared, atomic);
    }

    // Of a channel's lanes the first one writes.
#pragma unroll 1
    for (int c = 0; c < 2 * kPairs; c += 2) {
        const int own = c + channel_of_warp();
        const int64_t part = block.batch * p.dim + channels.first + own;
        const auto put = [&](float* to, int64_t place, float sum) {
#pragma unroll
            for (int distance = 16; distance > 1; distance /= 2) {
                sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            if (to != nullptr && own < channels.count && channel_lane() == 0) {
                to[place] = sum;
            }
        };
#pragma unroll 1
        for (int n = 0; n < states; ++n) {
            put(q.parts.dA, part * states + n, shared.dA[c / 2][n][threadIdx.x]);
        }
        put(q.parts.dD, part, shared.dD[c / 2][threadIdx.x]);
        put(q.parts.ddelta_bias, part, shared.ddelta_bias[c / 2][threadIdx.x]);
    }
    if (q.dinitial_state != nullptr && channels.has_state) {
        q.dinitial_state[channels.own_state] = channels.carries;
    }
}

template <typename T, int kWarps, int kPairs, int kBlocks, int kMostShared>
cudaError_t launch_few_states_backward(const ScanBackward& q) {
    constexpr int kShared = sizeof(FewStatesBackwardShared<T, kWarps, kPairs>);
    static_assert(kShared <= kMostShared, "what the table says");
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_few_states_backward_kernel<T, kWarps, kPairs, kBlocks>;
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const bool atomic = q.slots == 1 && p.dim / p.ngroups > 2 * kPairs * kWarps;
    return launch_kernel(kernel, scan_grid(p, 2 * kPairs * kWarps, 1), 32 * kWarps, kShared, p.run.stream, q,
                         inputs_in_quads(p) && gradients_in_quads(q), atomic);
}

}  // namespace mamba
