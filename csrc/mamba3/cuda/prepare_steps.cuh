// What prepare.cuh reads of a chunk's steps, and the decays and weights that it finds of them.
#pragma once

#include "mamba3/cuda/chunks.cuh"

namespace mamba {

constexpr int kMamba3PrepareThreads = 256;
constexpr int kMamba3PrepareWarps = kMamba3PrepareThreads / 32;
// Heads of a block, which share its angles' speeds, and of a warp that sums up turns.
constexpr int kMamba3PrepareHeads = 32;
constexpr int kMamba3TurnHeads = kMamba3PrepareHeads / kMamba3PrepareWarps;

// A step's decay is at least that in base 2, which is zero in float32 over any number of steps; so an infinite adt counts as
// zero too, and no difference of sums is infinity less infinity.
constexpr double kMamba3LeastDecay = -32768.0;

// adt, dt and trap of a chunk's steps and of the one behind them, of a block's heads; zero where there is no such step. The
// pitch lets lanes read a column, or write a row, from different banks.
struct Mamba3PrepareInputs {
    static constexpr int kPitch = kMamba3PrepareHeads + 1;
    static constexpr int kSize = (kMamba3MostSteps + 1) * kPitch;
    float dt[kSize];
    alignas(16) float others[2 * kSize];  // adt, then trap
    uint64_t lost[kMamba3PrepareWarps];   // a bit for each of a warp's steps whose speeds are not all numbers
};

// float_from_bits without a branch.
__device__ __forceinline__ float float_of_dtype(uint32_t bits, int32_t dtype) {
    const float wide = __uint_as_float(dtype == MAMBA_BFLOAT16 ? bits << 16 : bits);
    return dtype == MAMBA_FLOAT16 ? unpack2<__half>(bits).x : wide;
}

// A thread's share of one of them: an entry of every eighth row, or pairs of rows of every eighth head, so that lanes lie along
// heads or steps, whichever are neighbours in memory; the first warp has the row behind the chunk, too. As bits first, so that
// all loads are on their way together.
struct Mamba3PrepareShare {
    static constexpr int kOwn = kMamba3MostSteps / kMamba3PrepareWarps;
    uint32_t bits[kOwn + 1];
    int row, head;                 // of the first entry
    int row_odd, row_on, head_on;  // from there to an odd one's row, to the row and head two on
    int32_t dtype;

    // at: of the first row's first head. steps: rows of the chunk; existing: those that exist, and the one behind.
    __device__ __forceinline__ Mamba3PrepareShare(const void* from, int64_t at, int32_t dtype, int64_t len_stride,
                                                  int64_t head_stride, int steps, int existing, int heads)
        : dtype(dtype) {
        static_assert(kMamba3PrepareHeads == 32 && kMamba3PrepareWarps == 8 && kOwn == 8, "so all are shared out");
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const bool along_heads = head_stride <= len_stride;
        row = along_heads ? warp : lane;
        head = along_heads ? lane : warp;
        row_odd = along_heads ? 8 : 32;
        row_on = along_heads ? 16 : 0;
        head_on = along_heads ? 0 : 8;
        const int64_t odd = row_odd * len_stride, on = row_on * len_stride + head_on * head_stride;
        const int rows = existing < steps ? existing : steps;
        const auto load = [&](const auto* data) {
            const auto* own = data + at + row * len_stride + head * head_stride;
#pragma unroll
            for (int i = 0; i < kOwn; i += 2) {
                // Rows that no head has, rather than a branch.
                const int own_rows = head + i / 2 * head_on < heads ? rows : 0;
                bits[i] = own_row(i) < own_rows ? own[0] : 0u;
                bits[i + 1] = own_row(i + 1) < own_rows ? own[odd] : 0u;
                own += on;
            }
            bits[kOwn] = static_cast<int>(threadIdx.x) < heads && steps < existing
                             ? data[at + steps * len_stride + lane * head_stride]
                             : 0u;
        };
        if (dtype == MAMBA_FLOAT32) {
            load(static_cast<const uint32_t*>(from));
        } else {
            load(static_cast<const uint16_t*>(from));
        }
    }
    __device__ __forceinline__ int own_row(int i) const { return row + i % 2 * row_odd + i / 2 * row_on; }
    __device__ __forceinline__ void store(float* to, int steps) const {
        constexpr int kPitch = Mamba3PrepareInputs::kPitch;
        const int odd = row_odd * kPitch, on = row_on * kPitch + head_on;
        float* own = to + row * kPitch + head;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (own_row(i) < steps) {
                own[i % 2 * odd] = float_of_dtype(bits[i], dtype);
            }
            own += i % 2 * on;
        }
        if (threadIdx.x < kMamba3PrepareHeads) {
            to[steps * kPitch + threadIdx.x] = float_of_dtype(bits[kOwn], dtype);
        }
    }
};

// Where runs begin among a chunk's steps, a bit each.
struct Mamba3Runs {
    uint64_t begin;   // with the step
    uint64_t behind;  // with the step behind it, which may be the next chunk's

    // Of a warp. existing: steps, up to the one behind the chunk.
    __device__ __forceinline__ Mamba3Runs(const MambaMamba3& p, const Mamba3SlotChunk& chunk, int existing)
        : begin(0), behind(0) {
        if (p.seq_idx == nullptr) {
            return;
        }
        const int32_t* const seq_idx = p.seq_idx + chunk.sequence.row * p.seqlen + chunk.sequence.begin + chunk.first;
        for (int i = 0; i < kMamba3MostSteps; i += 32) {
            const int step = static_cast<int>(threadIdx.x % 32) + i;
            const bool first = chunk.first + step == 0;
            const bool begins = step < chunk.steps && !first && seq_idx[step] != seq_idx[step - 1];
            const bool next_begins = step + 1 < existing && seq_idx[step + 1] != seq_idx[step];
            begin |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, begins)) << i;
            behind |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, next_begins)) << i;
        }
    }
    // The first step of the run that has the step, -1 for a run that began before the chunk.
    __device__ __forceinline__ int start(int step) const {
        const uint64_t until = begin << (kMamba3MostSteps - 1 - step);
        return until == 0 ? -1 : step - __clzll(static_cast<int64_t>(until));
    }
    __device__ __forceinline__ int last_start() const { return start(kMamba3MostSteps - 1); }
    __device__ __forceinline__ bool begins_behind(int step) const { return (behind >> step & 1) != 0; }
};

// Of a chunk and head: four neighbouring steps are a lane's, and `width` lanes of a warp share it.
struct Mamba3LaneSteps {
    static constexpr int kEach = 4, kPitch = Mamba3PrepareInputs::kPitch;
    const float *dts, *adts, *traps;  // of the lane's first step
    int first, steps, existing;       // steps: of the chunk; existing: and the one behind it, if there is one
    float* to;                        // where the first step's kMamba3High goes, or NULL
    int64_t pitch;

    __device__ __forceinline__ void store(Mamba3StepArray array, const float (&values)[kEach]) const {
        *reinterpret_cast<float4*>(to + array * pitch) = make_float4(values[0], values[1], values[2], values[3]);
    }

    // adt's sums go through the lanes in double. place: this one's among them.
    __device__ __forceinline__ void find_decays(const Mamba3Runs& runs, int place, int width) const {
        double sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const double step = first + i < steps ? static_cast<double>(adts[i * kPitch]) * 1.4426950408889634 : 0.0;
            sum[i] = (step < kMamba3LeastDecay ? kMamba3LeastDecay : step) + (i > 0 ? sum[i - 1] : 0.0);
        }
        double before = sum[kEach - 1];
        for (int distance = 1; distance < width; distance *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, before, distance, width);
            before += place >= distance ? other : 0.0;
        }
        const double last = __shfl_sync(0xffffffffu, before, width - 1, width);
        before -= sum[kEach - 1];
        if (to == nullptr) {
            return;
        }
        float high[kEach], low[kEach], entering[kEach], leaving[kEach], starts[kEach];
        const int last_start = runs.last_start();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const double cs = before + sum[i];
            const int own = first + i, start = runs.start(own);
            high[i] = static_cast<float>(cs);
            low[i] = static_cast<float>(cs - static_cast<double>(high[i]));
            entering[i] = start < 0 ? exp2_fast(high[i] + low[i]) : 0.0f;
            leaving[i] = own < steps && own >= last_start ? exp2_fast(static_cast<float>(last - cs)) : 0.0f;
            starts[i] = __int_as_float(start);
        }
        store(kMamba3High, high);
        store(kMamba3Low, low);
        store(kMamba3Entering, entering);
        store(kMamba3Leaving, leaving);
        store(kMamba3Start, starts);
    }

    // lost: a bit for each step whose speeds are not all numbers. A count of turns is never NaN, so the weights are.
    __device__ __forceinline__ void find_weights(const Mamba3Runs& runs, uint64_t lost, bool turns, bool backward) const {
        if (to == nullptr) {
            return;
        }
        float gamma[kEach], scale[kEach], dt[kEach], lambda[kEach], rest[kEach];
        // (1 - lambda) dt of the step behind.
        float nu = first + kEach < existing ? sigmoid(-traps[kEach * kPitch]) * dts[kEach * kPitch] : 0.0f;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) {
            const int own = first + i;
            const bool exists = own < steps;
            const float own_dt = own < existing ? dts[i * kPitch] : 0.0f, raw = own < existing ? traps[i * kPitch] : 0.0f;
            const float own_lambda = sigmoid(raw), own_rest = sigmoid(-raw);
            const bool nan = turns && (own_dt - own_dt != 0.0f || (lost >> own & 1) != 0);
            gamma[i] = nan ? __int_as_float(0x7fffffff) : own_lambda * own_dt;
            scale[i] = exists ? gamma[i] + (runs.begins_behind(own) ? 0.0f : nu) : 0.0f;
            gamma[i] = exists ? gamma[i] : 0.0f;
            dt[i] = exists ? own_dt : 0.0f;
            lambda[i] = exists ? own_lambda : 0.0f;
            rest[i] = exists ? own_rest : 0.0f;
            nu = own_rest * own_dt;
        }
        store(kMamba3Gamma, gamma);
        store(kMamba3Scale, scale);
        store(kMamba3Dt, dt);
        if (backward) {
            store(kMamba3Lambda, lambda);
            store(kMamba3Rest, rest);
        }
    }
};

}  // namespace mamba
