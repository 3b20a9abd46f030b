// What all kernels of Mamba-3's scan need of the steps, found once: decays and weights, how fast angles turn, and the turns
// before each chunk. See Mamba3Chunks.
#pragma once

#include "mamba3/cuda/carry_angles.cuh"
#include "mamba3/cuda/prepare_steps.cuh"

namespace mamba {

// What a step turns, as a count. ordinary: the turns are fewer than 2^19. A double near 2^20 counts in units of 2^-32, and its
// lower word is what lies behind the whole turns.
__device__ __forceinline__ uint32_t count_of_step(double speed, double dt, bool ordinary) {
    if (ordinary) {
        return static_cast<uint32_t>(__double2loint(fma(speed, dt, 1572864.0)));
    }
    return count_of_turns(turn_of_step(static_cast<float>(speed), static_cast<float>(dt)));
}
constexpr double kMamba3OrdinaryStep = 1048576.0;  // of dt; a speed is 1/2 at most

using Mamba3HeadSteps = double[kMamba3PrepareHeads];

// Adds what some steps turn, of an angle and a warp's heads. speeds: of the angle, `pitch` apart. dts: of the first head.
__device__ __forceinline__ void add_steps(uint32_t (&turns)[kMamba3TurnHeads], const float* speeds, int pitch,
                                          const double* dts, int steps, bool ordinary) {
    if (ordinary) {
#pragma unroll 4
        for (int step = 0; step < steps; ++step, speeds += pitch, dts += kMamba3PrepareHeads) {
            const double speed = *speeds;
#pragma unroll
            for (int j = 0; j < kMamba3TurnHeads; ++j) {
                turns[j] += count_of_step(speed, dts[j], true);
            }
        }
    } else {
#pragma unroll 1
        for (int step = 0; step < steps; ++step, speeds += pitch, dts += kMamba3PrepareHeads) {
#pragma unroll
            for (int j = 0; j < kMamba3TurnHeads; ++j) {
                turns[j] += count_of_step(*speeds, dts[j], false);
            }
        }
    }
}

// What a chunk turns, of a warp's heads from the block's head `turn_head` on. dts: of the block's heads, as doubles. restart:
// the first step that counts.
struct Mamba3TurnsOfChunk {
    const MambaMamba3& p;
    const Mamba3Chunks& chunks;
    const Mamba3SlotChunk& chunk;
    int64_t slot, first_head;  // first_head: the block's
    int heads, turn_head, restart;
    const Mamba3HeadSteps* dts;
    bool ordinary;

    // Angle i, which heads share.
    __device__ __forceinline__ void of_shared_angle(const float* shared_speeds, int i) const {
        const int angles = static_cast<int>(p.nangles), part = static_cast<int>(chunks.part);
        uint32_t turns[kMamba3TurnHeads] = {};
        const auto store = [&](uint32_t* to) {
#pragma unroll
            for (int j = 0; j < kMamba3TurnHeads; ++j) {
                if (turn_head + j < heads) {
                    to[j * angles] = turns[j];
                }
            }
        };
        uint32_t* to = chunks.part_turns + mamba3_part_turns_index(p, chunks, slot, 0, first_head + turn_head) + i;
        for (int step = restart; step < chunk.steps; step += part) {
            if (chunks.parts > 1) {
                store(to);
                to += p.nheads * angles;
            }
            const int left = chunk.steps - step;
            add_steps(turns, shared_speeds + step * angles + i, angles, dts[step] + turn_head, left < part ? left : part,
                      ordinary);
        }
        store(chunks.turns + mamba3_turns_index(p, slot, first_head + turn_head) + i);
    }
    // Angle i of each head; its speeds, too.
    __device__ __forceinline__ void of_own_angles(int i) const {
        const int part = static_cast<int>(chunks.part);
        const int64_t first = chunk.sequence.begin + chunk.first;
        for (int j = turn_head; j < turn_head + kMamba3TurnHeads && j < heads; ++j) {
            uint32_t turns = 0;
            const int64_t head = first_head + j;
            for (int step = 0; step < chunk.steps; ++step) {
                const int64_t at = chunk.sequence.row * p.angle_batch_stride + (first + step) * p.angle_len_stride +
                                   head * p.angle_head_stride + i;
                const float speed = 0.5f * tanhf(load_as_float(p.angles, at, p.angle_dtype));
                chunks.speeds[mamba3_speeds_index(p, chunk.sequence.row, first + step, head) + i] = speed;
                if (chunks.parts > 1 && (step & (part - 1)) == 0) {
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
            chunks.turns[mamba3_turns_index(p, slot, head) + i] = turns;
        }
    }
};

// A warp's steps of the angles that heads share, a lane an angle. As bits first, see Mamba3PrepareShare.
struct Mamba3SharedAngles {
    static constexpr int kOwn = kMamba3MostSteps / kMamba3PrepareWarps;
    const MambaMamba3& p;
    int64_t at;  // of the warp's first step
    int warp, steps;
    uint32_t bits[kOwn];

    __device__ __forceinline__ Mamba3SharedAngles(const MambaMamba3& params, const Mamba3SlotChunk& chunk, int64_t first,
                                                  int own_warp)
        : p(params),
          at(chunk.sequence.row * p.angle_batch_stride + (first + kOwn * own_warp) * p.angle_len_stride),
          warp(own_warp),
          steps(chunk.steps) {}
    __device__ __forceinline__ void begin(int angle) {
        const auto load = [&](const auto* data) {
            const auto* own = data + at + angle;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                bits[j] = kOwn * warp + j < steps && angle < p.nangles ? *own : 0u;
                own += p.angle_len_stride;
            }
        };
        if (p.angle_dtype == MAMBA_FLOAT32) {
            load(static_cast<const uint32_t*>(p.angles));
        } else {
            load(static_cast<const uint16_t*>(p.angles));
        }
    }
    // From begin(lane) on, to (steps, S). lost: of each warp, a bit for each of its steps whose speeds are not all numbers.
    __device__ __forceinline__ void share(float* speeds, uint64_t* lost, int lane) {
        const int angles = static_cast<int>(p.nangles);
        uint64_t own_lost = 0;
        for (int angle = lane; angle - lane < angles; angle += 32) {
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                const int step = kOwn * warp + j;
                const float speed = 0.5f * tanhf(float_of_dtype(bits[j], p.angle_dtype));
                own_lost |= static_cast<uint64_t>(__any_sync(0xffffffffu, speed != speed) ? 1 : 0) << step;
                if (step < steps && angle < angles) {
                    speeds[step * angles + angle] = speed;
                }
            }
            begin(angle + 32);
        }
        if (lane == 0) {
            lost[warp] = own_lost;
        }
    }
};

// A block takes up to kMamba3PrepareHeads heads of a slot. turns gets what the chunk turns, from its last restart on; with
// parts there are no restarts.
__global__ void __launch_bounds__(kMamba3PrepareThreads, 4)
    mamba3_prepare_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    MAMBA_DYNAMIC_SHARED(16, float, shared_speeds);  // (steps, S), for all heads
    __shared__ Mamba3PrepareInputs inputs;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
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
    Mamba3SharedAngles shared(p, chunk, first, warp);
    if (shared_angles) {
        shared.begin(lane);
    }
    const Mamba3PrepareShare dt = share(p.dt, p.dt_dtype, p.dt_batch_stride, p.dt_len_stride, p.dt_head_stride);
    const Mamba3PrepareShare trap = share(p.trap, p.trap_dtype, p.trap_batch_stride, p.trap_len_stride, p.trap_head_stride);
    const Mamba3PrepareShare adt = share(p.adt, p.adt_dtype, p.adt_batch_stride, p.adt_len_stride, p.adt_head_stride);
    dt.store(inputs.dt, chunk_steps);
    trap.store(inputs.others + Mamba3PrepareInputs::kSize, chunk_steps);
    adt.store(inputs.others, chunk_steps);
    if (shared_angles) {
        shared.share(shared_speeds, inputs.lost, lane);
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
    const Mamba3Runs runs(p, chunk, existing);
    int width_log2 = 0;  // of the lanes that share a head
    while (Mamba3LaneSteps::kEach << width_log2 < chunks.pitch) {
        ++width_log2;
    }
    const int place = lane & ((1 << width_log2) - 1), own = Mamba3LaneSteps::kEach * place;
    const int heads_log2 = 5 - width_log2;  // of a warp at a time
    for (int begin = warp << heads_log2; begin < heads; begin += kMamba3PrepareWarps << heads_log2) {
        const int head = begin + (lane >> width_log2);
        const int at = own * Mamba3PrepareInputs::kPitch + head;
        const bool stores = head < heads && own < chunks.pitch;
        float* const to = mamba3_values(chunks, p.nheads, slot, first_head + head, kMamba3High) + own;
        const Mamba3LaneSteps steps = {inputs.dt + at,
                                       inputs.others + at,
                                       inputs.others + Mamba3PrepareInputs::kSize + at,
                                       own,
                                       chunk.steps,
                                       existing,
                                       stores ? to : nullptr,
                                       chunks.pitch};
        steps.find_decays(runs, place, 1 << width_log2);
        steps.find_weights(runs, lost, angles > 0, chunks.arrays > kMamba3ForwardArrays);
    }
    __syncthreads();

    // As doubles, in the place of what has been read.
    Mamba3HeadSteps* const dts = reinterpret_cast<Mamba3HeadSteps*>(inputs.others);
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
    const int restart = runs.last_start() > 0 ? runs.last_start() : 0;
    __syncwarp();
    const Mamba3TurnsOfChunk turns = {p, chunks, chunk, slot, first_head, heads, turn_head, restart, dts, ordinary};
    for (int i = lane; i < angles; i += 32) {
        if (shared_angles) {
            turns.of_shared_angle(shared_speeds, i);
        } else {
            turns.of_own_angles(i);
        }
    }
}

inline cudaError_t launch_mamba3_prepare(const MambaMamba3& p, const Mamba3Chunks& chunks) {
    if (chunks.slots > 0 && p.seqlen > 0) {
        const int64_t shared = p.angles_of_heads != 0 ? 0 : chunks.steps * p.nangles * 4;
        // Chunks of more than 128 states have half of the steps.
        static_assert(sizeof(Mamba3PrepareInputs) + kMamba3MostSteps * MAMBA_MAX_DSTATE <= 48 * 1024, "what every GPU has");
        const cudaError_t error =
            launch_programmatic_dependent(mamba3_prepare_kernel, Grid(chunks.slots, ceil_div(p.nheads, kMamba3PrepareHeads)),
                                          kMamba3PrepareThreads, static_cast<size_t>(shared), p.run.stream, p, chunks);
        if (error != cudaSuccess) {
            return error;
        }
    }
    const int64_t blocks = p.sequences * p.nheads;
    return launch_programmatic_dependent(mamba3_carry_angles_before_kernel, Grid(blocks), kMamba3CarryThreads, 0, p.run.stream,
                                         p, chunks);
}

}  // namespace mamba
