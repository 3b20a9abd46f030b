// What all kernels of Mamba-3's scan need of the steps, found once: decays and weights, how fast angles turn, and the turns
// before each chunk. See Mamba3Chunks.
#pragma once

#include "mamba3/cuda/chunks.cuh"

namespace mamba {

constexpr int kMamba3PrepareThreads = 256;
// Heads of a block, which share its angles' speeds.
constexpr int kMamba3PrepareHeads = 32;
// Angles of a lane at most.
constexpr int kMamba3LaneAngles = MAMBA_MAX_DSTATE / 2 / 32;

// A step's decay is at least that in base 2, which is zero in float32 over any number of steps; so an infinite adt counts as
// zero too, and no difference of sums is infinity less infinity.
constexpr double kMamba3LeastDecay = -32768.0;

// Two neighbouring steps of a lane.
struct Mamba3LaneSteps {
    float adt[2], dt[2], lambda[2], rest[2];
    float next;  // (1 - lambda) dt of the step behind them, if the second one counts in it
    bool exists[2], restarts[2];
};

__device__ __forceinline__ void load_lane_steps(Mamba3LaneSteps& s, const MambaMamba3& p, const Mamba3SlotChunk& chunk,
                                                int64_t head, int lane) {
    const Mamba3Sequence& sequence = chunk.sequence;
    uint32_t adt[2], dt[3], trap[3];
    bool known[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int64_t step = chunk.first + 2 * lane + i;  // of the sequence
        const int64_t at = sequence.begin + step;
        known[i] = step < sequence.seqlen && 2 * lane + i <= chunk.steps;
        dt[i] = trap[i] = 0;
        if (i < 2) {
            s.exists[i] = 2 * lane + i < chunk.steps;
            s.restarts[i] = false;
            adt[i] = 0;
        }
        if (known[i]) {
            dt[i] =
                load_bits(p.dt, sequence.row * p.dt_batch_stride + at * p.dt_len_stride + head * p.dt_head_stride, p.dt_dtype);
            trap[i] = load_bits(p.trap, sequence.row * p.trap_batch_stride + at * p.trap_len_stride + head * p.trap_head_stride,
                                p.trap_dtype);
            if (i < 2 && s.exists[i]) {
                adt[i] = load_bits(p.adt, sequence.row * p.adt_batch_stride + at * p.adt_len_stride + head * p.adt_head_stride,
                                   p.adt_dtype);
            }
            if (p.seq_idx != nullptr && step > 0) {
                const int32_t* const seq_idx = p.seq_idx + sequence.row * p.seqlen + at;
                const bool restarts = seq_idx[0] != seq_idx[-1];
                if (i < 2) {
                    s.restarts[i] = restarts;
                }
                known[i] = i < 2 || !restarts;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const float step = float_from_bits(dt[i], p.dt_dtype);
        const float raw = float_from_bits(trap[i], p.trap_dtype);
        if (i < 2) {
            s.adt[i] = float_from_bits(adt[i], p.adt_dtype);
            s.dt[i] = step;
            s.lambda[i] = sigmoid(raw);
            s.rest[i] = sigmoid(-raw);
        } else {
            s.next = known[i] ? sigmoid(-raw) * step : 0.0f;
        }
    }
}

// A warp finds the values of a chunk of one head, of which this lane has two steps: adt's sums go through the warp in double.
struct Mamba3LaneValues {
    float high[2], low[2], gamma[2], scale[2], entering[2], leaving[2];
    int start[2], last_start;  // last_start: of the chunk's last step
};

__device__ __forceinline__ void find_lane_values(Mamba3LaneValues& v, const Mamba3LaneSteps& s, int lane) {
    double sum[2];
    int run[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const double step = s.exists[i] ? static_cast<double>(s.adt[i]) * 1.4426950408889634 : 0.0;
        sum[i] = (step < kMamba3LeastDecay ? kMamba3LeastDecay : step) + (i > 0 ? sum[0] : 0.0);
        run[i] = s.exists[i] && s.restarts[i] ? 2 * lane + i : i > 0 ? run[0] : -1;
    }
    double before = sum[1];
    int started = run[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, before, distance);
        const int other_run = __shfl_up_sync(0xffffffffu, started, distance);
        if (lane >= distance) {
            before += other;
            started = other_run > started ? other_run : started;
        }
    }
    const double last = __shfl_sync(0xffffffffu, before, 31);
    v.last_start = __shfl_sync(0xffffffffu, started, 31);
    before -= sum[1];
    started = __shfl_up_sync(0xffffffffu, started, 1);
    started = lane == 0 ? -1 : started;
    // The step behind the chunk's last one may be this lane's second. What is not known has a dt of 0.
    const float nu[2] = {s.restarts[1] ? 0.0f : s.rest[1] * s.dt[1], s.next};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const double cs = before + sum[i];
        v.high[i] = static_cast<float>(cs);
        v.low[i] = static_cast<float>(cs - static_cast<double>(v.high[i]));
        v.start[i] = run[i] > started ? run[i] : started;
        v.gamma[i] = s.exists[i] ? s.lambda[i] * s.dt[i] : 0.0f;
        v.scale[i] = s.exists[i] ? v.gamma[i] + nu[i] : 0.0f;
        v.entering[i] = v.start[i] < 0 ? exp2_fast(v.high[i] + v.low[i]) : 0.0f;
        v.leaving[i] = s.exists[i] && 2 * lane + i >= v.last_start ? exp2_fast(static_cast<float>(last - cs)) : 0.0f;
    }
}

// A block takes up to kMamba3PrepareHeads heads of a slot, a warp one after the other. turns gets what each chunk turns, from
// its last restart on.
__global__ void __launch_bounds__(kMamba3PrepareThreads) mamba3_prepare_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    MAMBA_DYNAMIC_SHARED(16, float, shared_speeds);  // (steps, S), for all heads
    const int64_t head_blocks = ceil_div(p.nheads, kMamba3PrepareHeads);
    const int64_t slot = blockIdx.x / head_blocks;
    const int64_t first_head = blockIdx.x % head_blocks * kMamba3PrepareHeads;
    const int lane = threadIdx.x % 32;
    const int angles = static_cast<int>(p.nangles);
    const Mamba3SlotChunk chunk = mamba3_chunk_of_slot(p, chunks, slot);
    if (chunk.steps == 0) {
        return;
    }
    const int64_t first = chunk.sequence.begin + chunk.first;
    const bool shared_angles = p.angles_of_heads == 0;
    if (shared_angles) {
        for (int i = threadIdx.x; i < chunk.steps * angles; i += kMamba3PrepareThreads) {
            const int64_t step = first + i / angles;
            const int64_t at = chunk.sequence.row * p.angle_batch_stride + step * p.angle_len_stride + i % angles;
            const float speed = 0.5f * tanhf(load_as_float(p.angles, at, p.angle_dtype));
            shared_speeds[i] = speed;
            if (first_head == 0) {
                chunks.speeds[mamba3_speeds_index(p, chunk.sequence.row, step, 0) + i % angles] = speed;
            }
        }
        __syncthreads();
    }
    for (int64_t head = first_head + threadIdx.x / 32; head < first_head + kMamba3PrepareHeads && head < p.nheads;
         head += kMamba3PrepareThreads / 32) {
        Mamba3LaneSteps steps;
        Mamba3LaneValues values;
        load_lane_steps(steps, p, chunk, head, lane);
        find_lane_values(values, steps, lane);

        uint32_t turns[kMamba3LaneAngles] = {};
        for (int step = 0; step < chunk.steps; ++step) {
            const float even = __shfl_sync(0xffffffffu, steps.dt[0], step / 2);
            const float odd = __shfl_sync(0xffffffffu, steps.dt[1], step / 2);
            const float dt = step % 2 == 0 ? even : odd;
            bool lost = false;
            for (int j = 0; j < kMamba3LaneAngles && 32 * j < angles; ++j) {
                const int i = 32 * j + lane;
                float speed = 0.0f;
                if (i < angles) {
                    if (shared_angles) {
                        speed = shared_speeds[step * angles + i];
                    } else {
                        const int64_t at = chunk.sequence.row * p.angle_batch_stride + (first + step) * p.angle_len_stride +
                                           head * p.angle_head_stride + i;
                        speed = 0.5f * tanhf(load_as_float(p.angles, at, p.angle_dtype));
                        chunks.speeds[mamba3_speeds_index(p, chunk.sequence.row, first + step, head) + i] = speed;
                    }
                }
                const float turn = turn_of_step(speed, dt);
                lost = lost || turn != turn;
                if (step >= values.last_start) {
#pragma unroll
                    for (int k = 0; k < kMamba3LaneAngles; ++k) {  // so that turns stays in registers
                        turns[k] += k == j ? count_of_turns(turn) : 0u;
                    }
                }
            }
            // A count of turns is never NaN, so the weights are.
            if (__any_sync(0xffffffffu, lost) && lane == step / 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (step % 2 == i) {
                        values.gamma[i] = values.scale[i] = __int_as_float(0x7fffffff);
                    }
                }
            }
        }
        const int64_t turns_at = (slot * p.nheads + head) * angles;
#pragma unroll
        for (int j = 0; j < kMamba3LaneAngles; ++j) {
            if (32 * j + lane < angles) {
                chunks.turns[turns_at + 32 * j + lane] = turns[j];
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int step = 2 * lane + i;
            if (step < chunks.pitch) {
                float* const at = mamba3_values(chunks, p.nheads, slot, head, kMamba3High) + step;
                at[kMamba3High * chunks.pitch] = values.high[i];
                at[kMamba3Low * chunks.pitch] = values.low[i];
                at[kMamba3Gamma * chunks.pitch] = values.gamma[i];
                at[kMamba3Scale * chunks.pitch] = values.scale[i];
                at[kMamba3Entering * chunks.pitch] = values.entering[i];
                at[kMamba3Leaving * chunks.pitch] = values.leaving[i];
                at[kMamba3Start * chunks.pitch] = __int_as_float(values.start[i]);
                at[kMamba3Dt * chunks.pitch] = steps.exists[i] ? steps.dt[i] : 0.0f;
                if (chunks.arrays > kMamba3ForwardArrays) {
                    at[kMamba3Lambda * chunks.pitch] = steps.exists[i] ? steps.lambda[i] : 0.0f;
                    at[kMamba3Rest * chunks.pitch] = steps.exists[i] ? steps.rest[i] : 0.0f;
                }
            }
        }
    }
}

constexpr int kMamba3CarryThreads = 128;

// A block for each sequence and head: the turns before each chunk, from what each chunk turns. With final states also those of
// the angles, of k and of v.
__global__ void __launch_bounds__(kMamba3CarryThreads)
    mamba3_carry_turns_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    __shared__ uint32_t last_turns[MAMBA_MAX_DSTATE / 2];
    const int64_t index = blockIdx.x;  // of the sequence and head
    const int64_t head = index % p.nheads;
    const int64_t sequence_index = index / p.nheads;
    const int angles = static_cast<int>(p.nangles);
    const Mamba3Sequence sequence = mamba3_sequence(p, sequence_index);
    const int64_t count = ceil_div(sequence.seqlen, chunks.steps);
    const int64_t slot = mamba3_slot(p, chunks, sequence_index, sequence.begin);
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < angles; i += kMamba3CarryThreads) {
        uint32_t turn = p.angle_state != nullptr ? count_of_radians(p.angle_state[index * angles + i]) : 0u;
        constexpr int kAhead = 8;
        for (int64_t chunk = 0; chunk < count; chunk += kAhead) {
            uint32_t turned[kAhead];
            bool restarts[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                turned[j] = 0u;
                restarts[j] = false;
                if (chunk + j < count) {
                    turned[j] = chunks.turns[((slot + chunk + j) * p.nheads + head) * angles + i];
                    restarts[j] = p.seq_idx != nullptr && __float_as_int(mamba3_values(chunks, p.nheads, slot + chunk + j, head,
                                                                                       kMamba3Start)[chunks.steps - 1]) >= 0;
                }
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                if (chunk + j < count) {
                    chunks.turns[((slot + chunk + j) * p.nheads + head) * angles + i] = turn;
                    turn = restarts[j] ? turned[j] : turn + turned[j];
                }
            }
        }
        last_turns[i] = turn;
        if (p.final_angle != nullptr) {
            const bool kept = count == 0 && p.angle_state != nullptr;
            p.final_angle[index * angles + i] = kept ? p.angle_state[index * angles + i] : radians_of_count(turn);
        }
    }
    if (p.final_ssm == nullptr) {
        return;
    }
    __syncthreads();
    const int64_t last = sequence.begin + sequence.seqlen - 1;
    const int64_t group = head / (p.nheads / p.ngroups);
    for (int64_t i = threadIdx.x; i < p.rank * p.dstate; i += kMamba3CarryThreads) {
        const int64_t r = i / p.dstate;
        const int64_t to = ((sequence_index * p.rank + r) * p.nheads + head) * p.dstate;
        const int n = static_cast<int>(i % p.dstate);
        if (count == 0) {
            p.final_k[to + n] = p.k_state != nullptr ? p.k_state[to + n] : 0.0f;
            continue;
        }
        // n is the first or second of what angle `angle` turns.
        const int half = static_cast<int>(p.dstate / 2);
        const int angle = p.pairwise != 0 ? n / 2 : n < half ? n : n - half;
        const bool second = p.pairwise != 0 ? n % 2 != 0 : n >= half;
        const int64_t from =
            sequence.row * p.k_batch_stride + last * p.k_len_stride + r * p.k_rank_stride + group * p.k_group_stride;
        const float* const bias = p.k_bias + (head * p.rank + r) * p.dstate;
        const float own = load_as_float(p.k, from + n, p.dtype) + bias[n];
        if (angle >= angles) {
            p.final_k[to + n] = own;
            continue;
        }
        const int partner = p.pairwise != 0 ? n ^ 1 : second ? n - half : n + half;
        const float other = load_as_float(p.k, from + partner, p.dtype) + bias[partner];
        const float2 turn = cos_sin_of_turns(turns_of_count(last_turns[angle]));
        p.final_k[to + n] = second ? fmaf(own, turn.x, other * turn.y) : fmaf(own, turn.x, -(other * turn.y));
    }
    for (int64_t i = threadIdx.x; i < p.headdim; i += kMamba3CarryThreads) {
        const int64_t at = sequence.row * p.v_batch_stride + last * p.v_len_stride + head * p.v_head_stride + i;
        const float kept = p.v_state != nullptr ? p.v_state[index * p.headdim + i] : 0.0f;
        p.final_v[index * p.headdim + i] = count == 0 ? kept : load_as_float(p.v, at, p.dtype);
    }
}

inline cudaError_t launch_mamba3_prepare(const MambaMamba3& p, const Mamba3Chunks& chunks) {
    if (chunks.slots > 0 && p.seqlen > 0) {
        const int64_t blocks = chunks.slots * ceil_div(p.nheads, kMamba3PrepareHeads);
        const int64_t shared = p.angles_of_heads != 0 ? 0 : chunks.steps * p.nangles * 4;
        static_assert(kMamba3MostSteps * MAMBA_MAX_DSTATE / 2 * 4 <= 48 * 1024, "what every GPU has");
        const cudaError_t error = launch_kernel(mamba3_prepare_kernel, static_cast<unsigned>(blocks), kMamba3PrepareThreads,
                                                static_cast<size_t>(shared), p.run.stream, p, chunks);
        if (error != cudaSuccess) {
            return error;
        }
    }
    const int64_t blocks = p.sequences * p.nheads;
    return launch_overlapping(mamba3_carry_turns_kernel, static_cast<unsigned>(blocks), kMamba3CarryThreads, 0, p.run.stream, p,
                              chunks);
}

}  // namespace mamba
