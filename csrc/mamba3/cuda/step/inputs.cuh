// What a decoding step's block reads beside the state: a thread's channels and angle, and the rows of q and k.
#pragma once

#include "mamba3/cuda/step/output.cuh"
#include "mamba3/cuda/step/products.cuh"

namespace mamba {

// A thread's channels of v, the v before and z, as bits.
struct Mamba3StepChannels {
    static constexpr int kOwn = MAMBA_MAX_HEADDIM / kMamba3StepThreads;
    uint32_t v[kOwn], before[kOwn], z[kOwn];

    __device__ __forceinline__ Mamba3StepChannels(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, int64_t index,
                                                  int64_t batch, int64_t head) {
        const MambaMamba3& p = q.scan;
#pragma unroll
        for (int slot = 0; slot < kOwn; ++slot) {
            const int i = slot * kMamba3StepThreads + static_cast<int>(threadIdx.x);
            v[slot] = before[slot] = z[slot] = 0;
            if (i < p.headdim) {
                v[slot] = load_bits(p.v, batch * p.v_batch_stride + head * p.v_head_stride + i, dtypes.x);
                before[slot] = load_bits(q.state_v, index * p.headdim + i, dtypes.v);
                if (p.z != nullptr) {
                    z[slot] = load_bits(p.z, batch * p.z_batch_stride + head * p.z_head_stride + i, dtypes.x);
                }
            }
        }
    }
    // v becomes the cache's.
    __device__ __forceinline__ void share(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, int64_t index, float* v_of,
                                          float* v_before) const {
#pragma unroll
        for (int slot = 0; slot < kOwn; ++slot) {
            const int i = slot * kMamba3StepThreads + static_cast<int>(threadIdx.x);
            if (i < q.scan.headdim) {
                v_of[i] = float_from_bits(v[slot], dtypes.x);
                v_before[i] = float_from_bits(before[slot], dtypes.v);
                store_from_float(q.state_v, index * q.scan.headdim + i, dtypes.v, v_of[i]);
            }
        }
    }
};

// A thread's angle.
struct Mamba3StepAngle {
    uint32_t bits;
    float before;

    __device__ __forceinline__ Mamba3StepAngle(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, int64_t index,
                                               int64_t batch, int64_t head)
        : bits(0), before(0.0f) {
        const MambaMamba3& p = q.scan;
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < p.nangles) {
            const int64_t own = p.angles_of_heads != 0 ? head * p.angle_head_stride : 0;
            bits = load_bits(p.angles, batch * p.angle_batch_stride + own + thread, dtypes.angle);
            before = q.state_angle[index * p.nangles + thread];
        }
    }
    __device__ __forceinline__ void rotate(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, int64_t index, float dt,
                                           float2* cos_sin) const {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < q.scan.nangles) {
            const float turn = turn_of_step(0.5f * tanhf(float_from_bits(bits, dtypes.angle)), dt);
            const uint32_t count = count_of_radians(before) + count_of_turns(turn);
            // A count is never NaN.
            const float lost = turn == turn && before == before ? 0.0f : __int_as_float(0x7fffffff);
            const float2 found = cos_sin_of_turns(turns_of_count(count));
            cos_sin[thread] = make_float2(found.x + lost, found.y + lost);
            q.state_angle[index * q.scan.nangles + thread] = radians_of_count(count) + lost;
        }
    }
};

// The rows of some ranks of q and k, from memory to shared memory: even warps have k, odd ones q.
template <class Rows, int kRanks, bool kAtOnce>
struct Mamba3StepRanks {
    static constexpr bool kProducts = kMamba3Products<Rows>;
    static constexpr int kRowPairs = kProducts ? kMamba3ProductStates / 64 : Rows::kStates / 2;  // of q or k, in a lane
    static constexpr int kRowsAtOnce = kRanks > 1 && kRowPairs <= 2 ? 2 : 1;                     // in a warp
    const MambaMamba3& p;
    const Mamba3StepDtypes& dtypes;
    const Mamba3StepShared& shared;
    const Mamba3StepParts& parts;
    const Mamba3StepMatrix matrix;
    Mamba3StepRow<kRowPairs> row[kRowsAtOnce];
    int64_t head;
    int rank, held, pitch, warp, lane;

    __device__ __forceinline__ Mamba3StepRanks(const MambaMamba3Step& q, const Mamba3StepDtypes& of, const Mamba3StepShared& to,
                                               const Mamba3StepParts& to_parts, const Mamba3StepLayout& layout, int64_t batch,
                                               int64_t own_head, int64_t group, int ranks, int own_lane)
        : p(q.scan),
          dtypes(of),
          shared(to),
          parts(to_parts),
          matrix(q, of, threadIdx.x / 32 % 2 == 0, batch, own_head, group),
          head(own_head),
          rank(ranks),
          held(layout.held),
          pitch(layout.pitch),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(own_lane) {}

    // Of the ranks that are held together with `first`.
    __device__ __forceinline__ int end(int first) const { return kAtOnce || first + held > rank ? rank : first + held; }
    // Begins to load the warp's first rows.
    __device__ __forceinline__ void begin(int first) { load(first + warp / 2, end(first)); }
    __device__ __forceinline__ void load(int first, int behind) {
#pragma unroll
        for (int j = 0; j < kRowsAtOnce; ++j) {
            if (first + 2 * j < behind) {
                row[j].load(p, matrix, first + 2 * j, lane);
            }
        }
    }
    // The rows of the ranks from `first` on, whose loads are on their way, and what they are multiplied by. writes: k becomes
    // the cache's.
    __device__ __forceinline__ void hold(int first, bool writes, const Mamba3StepRates& rates, const float2* cos_sin,
                                         const float* v_of, const float* v_before) {
        const int behind = end(first), headdim = static_cast<int>(p.headdim);
        __syncthreads();  // cos_sin is there, and nobody needs the rows before
        for (int r = first + warp / 2; r < behind; r += 2 * kRowsAtOnce) {
#pragma unroll
            for (int j = 0; j < kRowsAtOnce; ++j) {
                const int own = r + 2 * j;
                if (own < behind) {
                    row[j].finish(p, matrix, own, lane, cos_sin, writes, [&](int n, float value, float before) {
                        put((own - first) * pitch + n, own, n, value, before);
                    });
                }
            }
            load(r + 2 * kRowsAtOnce, behind);
        }
        for (int i = static_cast<int>(threadIdx.x); i < headdim; i += kMamba3StepThreads) {
#pragma unroll 4
            for (int r = first; r < behind; ++r) {
                const float weight = step_projection(p, dtypes.parameter, p.mimo_v, head, r, i);
                shared.x[(r - first) * headdim + i] =
                    make_float2(rates.gamma * (weight * v_of[i]), rates.decay * (rates.nu * (weight * v_before[i])));
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ void put(int at, int own, int n, float value, float before) const {
        if constexpr (kProducts) {
            parts.put(warp % 2 == 0, own, n, value, before);
        } else if (warp % 2 == 0) {
            shared.k[at] = value;
            shared.before[at] = before;
        } else {
            shared.q[at] = value;
        }
    }
};

}  // namespace mamba
