// The gradients of angles, and what angles give to the gradient of dt, from what a step's own rows give (dturns): an angle
// turns all rows from its step on, so these are added up over later steps, those of later chunks by backward_carry.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

constexpr int kMamba3AnglesThreads = 256;
constexpr int kMamba3AnglesWarps = kMamba3AnglesThreads / 32;

// A block's chunk and 32 angles, a lane each. A warp has eight steps, of each of `sets` sets of four heads.
struct Mamba3AnglesBlock {
    static constexpr int kSteps = 8, kHeads = 4;
    const MambaMamba3Backward& q;
    const MambaMamba3& p;
    const Mamba3BackwardLaunch& launch;
    Mamba3Chunk chunk;
    int64_t slot;
    int lane, warp, groups, sets;  // groups of eight steps, a power of two of them
    int group, set;                // the warp's
    int first_step, steps;         // the warp's that exist
    int angle;                     // the lane's, the last one if it has none
    bool has_angle;
    int pitch, head_pitch;  // of dturns: to the next step, head
    const float* dturns;    // of the first head, the warp's first step, the angle
    uint64_t restarts;      // a bit of each step that begins a run

    __device__ __forceinline__ Mamba3AnglesBlock(const MambaMamba3Backward& q_, const Mamba3BackwardLaunch& launch_)
        : q(q_),
          p(q_.forward),
          launch(launch_),
          chunk(find_chunk(p, launch.chunks, blockIdx.x)),
          slot(blockIdx.x),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          groups(1),
          restarts(0) {
        while (groups * kSteps < chunk.steps) {
            groups *= 2;
        }
        sets = kMamba3AnglesWarps / groups;
        group = warp % groups;
        set = warp / groups;
        const int left = chunk.steps - group * kSteps;
        first_step = left > 0 ? group * kSteps : 0;
        steps = left < kSteps ? left : kSteps;
        const int own = static_cast<int>(blockIdx.y) * 32 + lane, last = static_cast<int>(p.nangles) - 1;
        has_angle = own <= last;
        angle = has_angle ? own : last;
        pitch = static_cast<int>(mamba3_dturns_pitch(p));
        head_pitch = static_cast<int>(launch.chunks.steps) * pitch;
        dturns =
            launch.at<const float>(launch.plan.workspace.dturns) + slot * p.nheads * head_pitch + (first_step * pitch + angle);
        if (p.seq_idx != nullptr) {
            const float* const start = mamba3_values(launch.chunks, p.nheads, slot, 0, kMamba3Start);
#pragma unroll
            for (int t = 0; t < kMamba3MostSteps; t += 32) {
                const bool begins = t + lane < chunk.steps && __float_as_int(start[t + lane]) == t + lane;
                restarts |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, begins)) << t;
            }
        }
    }
    __device__ __forceinline__ unsigned restarts_of(int of_group) const {
        return static_cast<unsigned>(restarts >> (of_group * kSteps)) & ((1u << kSteps) - 1);
    }
    // Of some angles of a step: (B, L, entries).
    __device__ __forceinline__ int64_t step(int j) const { return chunk.row * p.seqlen + chunk.first + first_step + j; }
    // Zero where there is no angle.
    __device__ __forceinline__ void load_speeds(float (&speeds)[kSteps], int64_t head) const {
        const float* const from =
            launch.chunks.speeds + mamba3_speeds_index(p, chunk.row, chunk.first + first_step, head) + angle;
        const int pitch = static_cast<int>(p.angles_of_heads != 0 ? p.nheads * p.nangles : p.nangles);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            speeds[j] = j < steps && has_angle ? from[j * pitch] : 0.0f;
        }
    }
    // Also of steps that do not exist: the workspace has room behind the last one, and add_up drops them.
    __device__ __forceinline__ void load(float (&later)[kSteps], int head) const {
        const float* from = dturns + head * head_pitch;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            later[j] = *from;
            from += pitch;
        }
    }
    // Of the warp's steps the sums over later ones of theirs.
    __device__ __forceinline__ void add_up(float (&later)[kSteps]) const {
        if (steps < kSteps) {
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                later[j] = j < steps ? later[j] : 0.0f;
            }
        }
        const unsigned own = restarts_of(group);
        if (own == 0) {
#pragma unroll
            for (int j = kSteps - 2; j >= 0; --j) {
                later[j] += later[j + 1];
            }
        } else {
#pragma unroll
            for (int j = kSteps - 2; j >= 0; --j) {
                later[j] += (own >> (j + 1) & 1) != 0 ? 0.0f : later[j + 1];
            }
        }
    }
    // Then those of later groups and chunks. parts: each group's sum from its first step on.
    __device__ __forceinline__ void add_later_groups(float (&later)[kSteps], const float (*parts)[32], float behind) const {
        if (restarts == 0) {
            for (int part = groups - 1; part > group; --part) {
                behind += parts[part][lane];
            }
        }
        for (int part = groups - 1; part > group && restarts != 0; --part) {
            const unsigned restart = restarts_of(part);
            behind = (restart & 1) != 0 ? 0.0f : (restart != 0 ? 0.0f : behind) + parts[part][lane];
        }
        const unsigned own = restarts_of(group);
        if (own == 0) {
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                later[j] += behind;
            }
        } else {
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                later[j] += own >> (j + 1) != 0 ? 0.0f : behind;
            }
        }
    }
    // The gradient of a step's angle from that of its turn. entry: of the angles of a step.
    __device__ __forceinline__ void store(int j, int64_t entry, float speed, float turn) const {
        if (j < steps && has_angle) {
            store_from_float(q.dangles, step(j) * q.dangle_step_stride + entry, p.angle_dtype,
                             (1.0f - 4.0f * speed * speed) * 3.14159265f * turn);
        }
    }
};

__global__ void __launch_bounds__(kMamba3AnglesThreads, 2)
    mamba3_finish_angles_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    using Block = Mamba3AnglesBlock;
    constexpr int kSteps = Block::kSteps, kHeads = Block::kHeads;
    __shared__ float parts[2][kHeads][kMamba3AnglesWarps][32];
    __shared__ float dts[kMamba3AnglesWarps][kHeads][kSteps];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Block block(q, launch);
    if (block.chunk.steps == 0) {
        return;
    }
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const bool of_heads = p.angles_of_heads != 0;
    const int nheads = static_cast<int>(p.nheads), lane = block.lane, i_of_lane = lane / kSteps, j_of_lane = lane % kSteps;
    const float* const carries = launch.at<const float>(w.angle_carry) + block.slot * p.nheads * p.nangles + block.angle;
    float* const turned =
        launch.at<float>(w.turned) + (blockIdx.y * p.batch * p.seqlen + block.step(j_of_lane)) * p.nheads + i_of_lane;
    const float* const own_dts = mamba3_values(launch.chunks, p.nheads, block.slot, 0, kMamba3Dt) + block.first_step +
                                 (j_of_lane < block.steps ? j_of_lane : 0);
    const int angles = static_cast<int>(p.nangles), dts_pitch = static_cast<int>(launch.chunks.arrays * launch.chunks.pitch);
    float speeds[kSteps], total[kSteps] = {};
    block.load_speeds(speeds, 0);
    int place = 0;
    for (int first = 0; first < nheads; first += kHeads * block.sets, place ^= 1) {
        const int own_head = first + block.set * kHeads;
        const auto head_of = [&](int i) { return own_head + i < nheads ? own_head + i : nheads - 1; };
        float later[kHeads][kSteps], carry[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            block.load(later[i], head_of(i));
            carry[i] = carries[head_of(i) * angles];
        }
        const float own_dt = own_dts[head_of(i_of_lane) * dts_pitch];
        __syncwarp();  // the heads before have been read
        dts[block.warp][i_of_lane][j_of_lane] = j_of_lane < block.steps && own_head + i_of_lane < nheads ? own_dt : 0.0f;
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            block.add_up(later[i]);
            parts[place][i][block.warp][lane] = later[i][0];
        }
        __syncthreads();  // the other place is free when all are here again
        const auto apply = [&](int i, const auto& add) {
            block.add_later_groups(later[i], parts[place][i] + block.set * block.groups, carry[i]);
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                add(j, dts[block.warp][i][j] * later[i][j]);
                later[i][j] *= speeds[j];
            }
        };
        if (!of_heads) {
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                apply(i, [&](int j, float turn) { total[j] += turn; });
            }
        } else {
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                block.load_speeds(speeds, head_of(i));
                apply(i, [&](int j, float turn) {
                    if (own_head + i < nheads) {
                        block.store(j, (own_head + i) * p.nangles + block.angle, speeds[j], turn);
                    }
                });
            }
        }
        float(&sums)[kHeads * kSteps] = reinterpret_cast<float(&)[kHeads * kSteps]>(later);
        transpose_sum<kHeads * kSteps, 16, 1>(sums, lane);
        if (j_of_lane < block.steps && own_head + i_of_lane < nheads) {
            turned[own_head] = 6.28318531f * sums[0];
        }
    }
    if (of_heads) {
        return;
    }
    float(*const totals)[32] = parts[0][0];  // of the warps' steps, one after the other
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        __syncthreads();
        totals[block.warp][lane] = total[j];
        __syncthreads();
        for (int set = 1; set < block.sets; ++set) {
            total[j] += totals[block.group + set * block.groups][lane];
        }
        if (block.set == 0) {
            block.store(j, block.angle, speeds[j], total[j]);
        }
    }
}

}  // namespace mamba
