// What all kernels of Mamba-3's scan need of the steps, found once: decays and weights, how fast angles turn, and the turns
// before each chunk. See Mamba3Chunks.
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
    int last_start;                       // of all heads, -1: none
};

// A thread's share of one of them: an entry of every eighth row, or pairs of rows of every eighth head, so that lanes lie along
// heads or steps, whichever are neighbours in memory; the first warp has the row behind the chunk's steps, too. As bits first,
// so that all loads are on their way together; what does not exist is another entry till then.
struct Mamba3PrepareShare {
    static constexpr int kOwn = kMamba3MostSteps / kMamba3PrepareWarps;
    uint32_t bits[kOwn + 1];
    int row, head;                 // of the first entry
    int row_odd, row_on, head_on;  // from there to an odd one's row, to the row and head two on
    int32_t dtype;

    // at: of the first row's first head. existing: rows, up to the one behind the chunk's `steps`.
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
        const auto offset = [&](int own_row, int own_head) {
            own_row = own_row < existing ? own_row : existing - 1;
            own_head = own_head < heads ? own_head : heads - 1;
            return at + own_row * len_stride + own_head * head_stride;
        };
        const auto load = [&](const auto* data) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                bits[i] = data[offset(own_row(i), own_head(i))];
            }
            bits[kOwn] = data[offset(steps, lane)];
        };
        if (dtype == MAMBA_FLOAT32) {
            load(static_cast<const uint32_t*>(from));
        } else {
            load(static_cast<const uint16_t*>(from));
        }
    }
    __device__ __forceinline__ int own_row(int i) const { return row + i % 2 * row_odd + i / 2 * row_on; }
    __device__ __forceinline__ int own_head(int i) const { return head + i / 2 * head_on; }
    __device__ __forceinline__ void store(float* to, int steps, int existing, int heads) const {
        const auto store_one = [&](int own_row, int own_head, uint32_t own) {
            const float value = float_from_bits(own, dtype);
            to[own_row * Mamba3PrepareInputs::kPitch + own_head] = own_row < existing && own_head < heads ? value : 0.0f;
        };
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            store_one(own_row(i), own_head(i), bits[i]);
        }
        __syncwarp();
        if (threadIdx.x < kMamba3PrepareHeads) {
            store_one(steps, threadIdx.x, bits[kOwn]);
        }
    }
};

// Two neighbouring steps of a lane.
struct Mamba3LaneSteps {
    float adt[2], dt[2], lambda[2], rest[2];
    float next;  // (1 - lambda) dt of the step behind them, if the second one counts in it
    bool exists[2], restarts[2];
};

// column: of the head. place: of the lane among those of the head.
__device__ __forceinline__ void load_lane_steps(Mamba3LaneSteps& s, const MambaMamba3& p, const Mamba3SlotChunk& chunk,
                                                const Mamba3PrepareInputs& inputs, int column, int place) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int own = 2 * place + i;
        const bool known = own <= chunk.steps && chunk.first + own < chunk.sequence.seqlen;
        bool restarts = false;
        if (known && p.seq_idx != nullptr && chunk.first + own > 0) {
            const int32_t* const seq_idx = p.seq_idx + chunk.sequence.row * p.seqlen + chunk.sequence.begin + chunk.first + own;
            restarts = seq_idx[0] != seq_idx[-1];
        }
        const int at = own * Mamba3PrepareInputs::kPitch + column;
        const float dt = known ? inputs.dt[at] : 0.0f, raw = known ? inputs.others[Mamba3PrepareInputs::kSize + at] : 0.0f;
        if (i < 2) {
            s.exists[i] = own < chunk.steps;
            s.restarts[i] = restarts;
            s.adt[i] = s.exists[i] ? inputs.others[at] : 0.0f;
            s.dt[i] = dt;
            s.lambda[i] = sigmoid(raw);
            s.rest[i] = sigmoid(-raw);
        } else {
            s.next = known && !restarts ? sigmoid(-raw) * dt : 0.0f;
        }
    }
}

// Lanes find the values of a chunk of one head, `width` of a warp with two steps each: adt's sums go through them in double.
struct Mamba3LaneValues {
    float high[2], low[2], gamma[2], scale[2], entering[2], leaving[2];
    int start[2], last_start;  // last_start: of the chunk's last step
};

// restarts: whether there may be any.
__device__ __forceinline__ void find_lane_values(Mamba3LaneValues& v, const Mamba3LaneSteps& s, int place, int width,
                                                 bool restarts) {
    double sum[2];
    int run[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const double step = s.exists[i] ? static_cast<double>(s.adt[i]) * 1.4426950408889634 : 0.0;
        sum[i] = (step < kMamba3LeastDecay ? kMamba3LeastDecay : step) + (i > 0 ? sum[0] : 0.0);
        run[i] = s.exists[i] && s.restarts[i] ? 2 * place + i : i > 0 ? run[0] : -1;
    }
    double before = sum[1];
    int started = run[1];
    for (int distance = 1; distance < width; distance *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, before, distance, width);
        before += place >= distance ? other : 0.0;
    }
    const double last = __shfl_sync(0xffffffffu, before, width - 1, width);
    before -= sum[1];
    v.last_start = -1;
    if (restarts) {
        for (int distance = 1; distance < width; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, started, distance, width);
            started = place >= distance && other > started ? other : started;
        }
        v.last_start = __shfl_sync(0xffffffffu, started, width - 1, width);
        started = __shfl_up_sync(0xffffffffu, started, 1, width);
        started = place == 0 ? -1 : started;
    }
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
        v.leaving[i] = s.exists[i] && 2 * place + i >= v.last_start ? exp2_fast(static_cast<float>(last - cs)) : 0.0f;
    }
}

// What a step turns, as a count. ordinary: the turns are fewer than 2^19. A double near 2^20 counts in units of 2^-32, and its
// lower word is what lies behind the whole turns.
__device__ __forceinline__ uint32_t count_of_step(double speed, double dt, bool ordinary) {
    if (ordinary) {
        return static_cast<uint32_t>(__double2loint(fma(speed, dt, 1572864.0)));
    }
    return count_of_turns(turn_of_step(static_cast<float>(speed), static_cast<float>(dt)));
}
constexpr double kMamba3OrdinaryStep = 1048576.0;  // of dt; a speed is 1/2 at most

// A block takes up to kMamba3PrepareHeads heads of a slot. turns gets what the chunk turns, from its last restart on; with
// parts there are no restarts.
__global__ void __launch_bounds__(kMamba3PrepareThreads, 4)
    mamba3_prepare_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    MAMBA_DYNAMIC_SHARED(16, float, shared_speeds);  // (steps, S), for all heads
    __shared__ Mamba3PrepareInputs inputs;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t slot = blockIdx.x, first_head = static_cast<int64_t>(blockIdx.y) * kMamba3PrepareHeads;
    const int heads =
        static_cast<int>(p.nheads - first_head < kMamba3PrepareHeads ? p.nheads - first_head : kMamba3PrepareHeads);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int angles = static_cast<int>(p.nangles);
    const Mamba3SlotChunk chunk = mamba3_chunk_of_slot(p, chunks, slot);
    if (chunk.steps == 0) {
        return;
    }
    const int64_t first = chunk.sequence.begin + chunk.first;
    const bool shared_angles = p.angles_of_heads == 0;

    const int chunk_steps = static_cast<int>(chunks.steps);
    const int64_t left = chunk.sequence.seqlen - chunk.first;
    const int existing = static_cast<int>(left < chunk_steps + 1 ? left : chunk_steps + 1);
    const auto share = [&](const void* from, int32_t dtype, int64_t batch_stride, int64_t len_stride, int64_t head_stride) {
        const int64_t at = chunk.sequence.row * batch_stride + first * len_stride + first_head * head_stride;
        return Mamba3PrepareShare(from, at, dtype, len_stride, head_stride, chunk_steps, existing, heads);
    };
    // A warp's steps of the angles that heads share.
    constexpr int kOwn = kMamba3MostSteps / kMamba3PrepareWarps;
    uint32_t angle_bits[kOwn] = {};
    const auto begin_angles = [&](int first_angle) {
        const int angle = first_angle + lane < angles ? first_angle + lane : angles - 1;
        const auto load = [&](const auto* data) {
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                const int own = kOwn * warp + j, step = own < chunk.steps ? own : chunk.steps - 1;
                angle_bits[j] = data[chunk.sequence.row * p.angle_batch_stride + (first + step) * p.angle_len_stride + angle];
            }
        };
        if (p.angle_dtype == MAMBA_FLOAT32) {
            load(static_cast<const uint32_t*>(p.angles));
        } else {
            load(static_cast<const uint16_t*>(p.angles));
        }
    };
    if (shared_angles && angles > 0) {
        begin_angles(0);
    }
    const Mamba3PrepareShare dt = share(p.dt, p.dt_dtype, p.dt_batch_stride, p.dt_len_stride, p.dt_head_stride);
    const Mamba3PrepareShare trap = share(p.trap, p.trap_dtype, p.trap_batch_stride, p.trap_len_stride, p.trap_head_stride);
    const Mamba3PrepareShare adt = share(p.adt, p.adt_dtype, p.adt_batch_stride, p.adt_len_stride, p.adt_head_stride);
    dt.store(inputs.dt, chunk_steps, existing, heads);
    trap.store(inputs.others + Mamba3PrepareInputs::kSize, chunk_steps, existing, heads);
    adt.store(inputs.others, chunk_steps, existing, heads);
    if (shared_angles) {
        uint64_t lost = 0;
        for (int first_angle = 0; first_angle < angles; first_angle += 32) {
            const int angle = first_angle + lane;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                const int step = kOwn * warp + j;
                const float speed = 0.5f * tanhf(float_from_bits(angle_bits[j], p.angle_dtype));
                lost |= static_cast<uint64_t>(__any_sync(0xffffffffu, speed != speed) ? 1 : 0) << step;
                if (step < chunk.steps && angle < angles) {
                    shared_speeds[step * angles + angle] = speed;
                }
            }
            if (first_angle + 32 < angles) {
                begin_angles(first_angle + 32);
            }
        }
        if (lane == 0) {
            inputs.lost[warp] = lost;
        }
    }
    __syncthreads();
    if (shared_angles && first_head == 0) {
        float* const to = chunks.speeds + mamba3_speeds_index(p, chunk.sequence.row, first, 0);
        for (int i = threadIdx.x; i < chunk.steps * angles; i += kMamba3PrepareThreads) {
            to[i] = shared_speeds[i];
        }
    }

    uint64_t lost = 0;
    for (int i = 0; i < kMamba3PrepareWarps && shared_angles; ++i) {
        lost |= inputs.lost[i];
    }
    int width = 1;
    while (2 * width < chunks.pitch) {
        width *= 2;
    }
    for (int head = 32 / width * warp + lane / width; head - lane / width < heads; head += 32 / width * kMamba3PrepareWarps) {
        const int place = lane % width;
        Mamba3LaneSteps steps;
        Mamba3LaneValues values;
        load_lane_steps(steps, p, chunk, inputs, head, place);
        find_lane_values(values, steps, place, width, p.seq_idx != nullptr);
        if (threadIdx.x == 0) {
            inputs.last_start = values.last_start;
        }
        float* const chunk_values = mamba3_values(chunks, p.nheads, slot, first_head + head, kMamba3High);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // A count of turns is never NaN, so the weights are.
            const bool turns = steps.dt[i] - steps.dt[i] == 0.0f && (lost >> (2 * place + i) & 1) == 0;
            if (steps.exists[i] && angles > 0 && !turns) {
                values.gamma[i] = values.scale[i] = __int_as_float(0x7fffffff);
            }
        }
        if (head < heads && 2 * place < chunks.pitch) {  // an even number
            const auto store = [&](Mamba3StepArray array, float first_value, float second_value) {
                *reinterpret_cast<float2*>(chunk_values + array * chunks.pitch + 2 * place) =
                    make_float2(first_value, second_value);
            };
            const auto store_existing = [&](Mamba3StepArray array, const float(&of_steps)[2]) {
                store(array, steps.exists[0] ? of_steps[0] : 0.0f, steps.exists[1] ? of_steps[1] : 0.0f);
            };
            store(kMamba3High, values.high[0], values.high[1]);
            store(kMamba3Low, values.low[0], values.low[1]);
            store(kMamba3Gamma, values.gamma[0], values.gamma[1]);
            store(kMamba3Scale, values.scale[0], values.scale[1]);
            store(kMamba3Entering, values.entering[0], values.entering[1]);
            store(kMamba3Leaving, values.leaving[0], values.leaving[1]);
            store(kMamba3Start, __int_as_float(values.start[0]), __int_as_float(values.start[1]));
            store_existing(kMamba3Dt, steps.dt);
            if (chunks.arrays > kMamba3ForwardArrays) {
                store_existing(kMamba3Lambda, steps.lambda);
                store_existing(kMamba3Rest, steps.rest);
            }
        }
    }
    __syncthreads();

    // As doubles, where nothing else is needed any more.
    double(*const dts)[kMamba3PrepareHeads] = reinterpret_cast<double(*)[kMamba3PrepareHeads]>(inputs.others);
    static_assert(sizeof(inputs.others) >= sizeof(*dts) * kMamba3MostSteps, "room");
    bool ordinary = true;
    const int turn_head = kMamba3TurnHeads * warp;
    for (int i = lane; i < chunk.steps * kMamba3TurnHeads; i += 32) {
        const int step = i / kMamba3TurnHeads, head = turn_head + i % kMamba3TurnHeads;
        const double dt = inputs.dt[step * Mamba3PrepareInputs::kPitch + head];
        dts[step][head] = dt;
        ordinary = ordinary && fabs(dt) < kMamba3OrdinaryStep;
    }
    ordinary = !__any_sync(0xffffffffu, !ordinary);
    const int restart = inputs.last_start > 0 ? inputs.last_start : 0;
    __syncwarp();
    const int part = static_cast<int>(chunks.part);
    for (int i = lane; i - lane < angles; i += 32) {
        if (shared_angles) {
            uint32_t turns[kMamba3TurnHeads] = {};
            const auto store = [&](uint32_t* to) {
#pragma unroll
                for (int j = 0; j < kMamba3TurnHeads; ++j) {
                    if (turn_head + j < heads && i < angles) {
                        to[j * angles + i] = turns[j];
                    }
                }
            };
            uint32_t* to = chunks.part_turns + mamba3_part_turns_index(p, chunks, slot, 0, first_head + turn_head);
            for (int begin = restart; begin < chunk.steps; begin += part) {
                if (chunks.parts > 1) {
                    store(to);
                    to += p.nheads * angles;
                }
                const int end = begin + part < chunk.steps ? begin + part : chunk.steps;
#pragma unroll 4
                for (int step = begin; step < end; ++step) {
                    const double speed = i < angles ? shared_speeds[step * angles + i] : 0.0f;
#pragma unroll
                    for (int j = 0; j < kMamba3TurnHeads; ++j) {
                        turns[j] += count_of_step(speed, dts[step][turn_head + j], ordinary);
                    }
                }
            }
            store(chunks.turns + mamba3_turns_index(p, slot, first_head + turn_head));
            continue;
        }
        for (int j = turn_head; j < turn_head + kMamba3TurnHeads && j < heads; ++j) {
            uint32_t turns = 0;
            const int64_t head = first_head + j;
            for (int step = 0; step < chunk.steps; ++step) {
                float speed = 0.0f;
                if (i < angles) {
                    const int64_t at = chunk.sequence.row * p.angle_batch_stride + (first + step) * p.angle_len_stride +
                                       head * p.angle_head_stride + i;
                    speed = 0.5f * tanhf(load_as_float(p.angles, at, p.angle_dtype));
                    chunks.speeds[mamba3_speeds_index(p, chunk.sequence.row, first + step, head) + i] = speed;
                }
                if (chunks.parts > 1 && (step & (part - 1)) == 0 && i < angles) {
                    chunks.part_turns[mamba3_part_turns_index(p, chunks, slot, step / part, head) + i] = turns;
                }
                if (step >= restart) {
                    turns += count_of_step(speed, dts[step][j], ordinary);
                }
                if (speed != speed) {
                    float* const chunk_values = mamba3_values(chunks, p.nheads, slot, head, kMamba3High) + step;
                    chunk_values[kMamba3Gamma * chunks.pitch] = chunk_values[kMamba3Scale * chunks.pitch] = speed;
                }
            }
            if (i < angles) {
                chunks.turns[mamba3_turns_index(p, slot, head) + i] = turns;
            }
        }
    }
}

constexpr int kMamba3CarryThreads = 128;

// A block for each sequence and head: the turns before each chunk, from what each turns. With final states also those of the
// angles, of k and of v.
__global__ void __launch_bounds__(kMamba3CarryThreads)
    mamba3_carry_turns_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    __shared__ uint32_t last_turns[MAMBA_MAX_DSTATE / 2];
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t index = blockIdx.x;  // of the sequence and head
    const int64_t head = index % p.nheads;
    const int64_t sequence_index = index / p.nheads;
    const int angles = static_cast<int>(p.nangles);
    const Mamba3Sequence sequence = mamba3_sequence(p, sequence_index);
    const int64_t count = ceil_div(sequence.seqlen, chunks.steps);
    const int64_t slot = mamba3_slot(p, chunks, sequence_index, sequence.begin);
    for (int i = threadIdx.x; i < angles; i += kMamba3CarryThreads) {
        uint32_t turn = p.angle_state != nullptr ? count_of_radians(p.angle_state[index * angles + i]) : 0u;
        constexpr int kAhead = 8;
        uint32_t* const turns = chunks.turns + mamba3_turns_index(p, slot, head) + i;
        const int64_t pitch = p.nheads * angles;
        for (int64_t chunk = 0; chunk < count; chunk += kAhead) {
            uint32_t turned[kAhead];
            bool restarts[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                turned[j] = 0u;
                restarts[j] = false;
                if (chunk + j < count) {
                    turned[j] = turns[(chunk + j) * pitch];
                    restarts[j] = p.seq_idx != nullptr && __float_as_int(mamba3_values(chunks, p.nheads, slot + chunk + j, head,
                                                                                       kMamba3Start)[chunks.steps - 1]) >= 0;
                }
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                if (chunk + j < count) {
                    turns[(chunk + j) * pitch] = turn;
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
        const int64_t shared = p.angles_of_heads != 0 ? 0 : chunks.steps * p.nangles * 4;
        // Chunks of more than 128 states have half of the steps.
        static_assert(sizeof(Mamba3PrepareInputs) + kMamba3MostSteps * MAMBA_MAX_DSTATE <= 48 * 1024, "what every GPU has");
        const cudaError_t error =
            launch_overlapping(mamba3_prepare_kernel, Grid(chunks.slots, ceil_div(p.nheads, kMamba3PrepareHeads)),
                               kMamba3PrepareThreads, static_cast<size_t>(shared), p.run.stream, p, chunks);
        if (error != cudaSuccess) {
            return error;
        }
    }
    const int64_t blocks = p.sequences * p.nheads;
    return launch_overlapping(mamba3_carry_turns_kernel, static_cast<unsigned>(blocks), kMamba3CarryThreads, 0, p.run.stream, p,
                              chunks);
}

}  // namespace mamba
