// What mamba3/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Rows (steps times rank) that are worked on together: within a chunk the scan is products of matrices.
constexpr int kMamba3Rows = 64;
// Heads that one forward call takes, so that their states stay in a core's own cache.
constexpr int64_t kMamba3Heads = 8;

// How a row of q or k, or a state's N, lies in a tile: the first ones of all pairs, their second ones, and what is not turned
// in two parts. Each begins at a whole vector, so a turn is the same arithmetic on vectors for both kinds of pairs; products do
// not mind the order, since q, k and the states have the same.
struct Mamba3Layout {
    int64_t count[4];   // entries of a part
    int64_t begin[4];   // where it begins in memory
    int64_t stride[4];  // in memory
    int64_t column[4];  // where it begins in a tile
    int64_t turned;     // columns of the first part, and of tiles of angles
    int64_t width;      // of a tile
    int64_t pitch_P;    // columns of a tile of v
};

Mamba3Layout mamba3_layout(const MambaMamba3& params);

// What backward leaves for its last pass: a block is some heads of a group, a slot some of the sequences.
struct Mamba3Space {
    int64_t blocks, block_heads, slots;
    float* matrices;  // (2, G, blocks, B L, R, width): dq and dk of a block's heads
    float* angles;    // (G, blocks, B L, turned): dangles of a block's heads, where all heads have the same angles
    float* sums;      // (slots, H, sums_of(...)): gradients of parameters
    int64_t sum_floats;
};

struct Mamba3Kernels {
    // Floats of scratch memory.
    int64_t (*forward_scratch)(const MambaMamba3& params, const Mamba3Layout& layout);
    int64_t (*backward_scratch)(const MambaMamba3& params, const Mamba3Layout& layout);
    int64_t (*sum_floats)(const MambaMamba3& params, const Mamba3Layout& layout);
    int64_t (*step_scratch)(const MambaMamba3& params, const Mamba3Layout& layout);
    // Some heads of one group, of one batch entry or sequence of cu_seqlens.
    void (*forward)(const MambaMamba3& params, const Mamba3Layout& layout, int64_t sequence, int64_t head, int64_t heads,
                    float* scratch);
    // One block of heads, of one slot's sequences.
    void (*backward)(const MambaMamba3Backward& params, const Mamba3Layout& layout, const Mamba3Space& space, int64_t slot,
                     int64_t group, int64_t block, float* scratch);
    // Adds blocks up, for one group and some steps of a row, or all groups' dangles: group -1.
    void (*finish)(const MambaMamba3Backward& params, const Mamba3Layout& layout, const Mamba3Space& space, int64_t group,
                   int64_t row, int64_t begin, int64_t end, float* scratch);
    // Adds slots up: the gradients of one head's parameters.
    void (*finish_head)(const MambaMamba3Backward& params, const Mamba3Layout& layout, const Mamba3Space& space, int64_t head,
                        float* scratch);
    // Heads [begin, end) of a decoding step, counted through the batch.
    void (*step)(const MambaMamba3Step& params, const Mamba3Layout& layout, int64_t begin, int64_t end, float* scratch);
};

namespace generic {
extern const Mamba3Kernels mamba3_kernels;
}
namespace avx2 {
extern const Mamba3Kernels mamba3_kernels;
}
namespace avx512 {
extern const Mamba3Kernels mamba3_kernels;
}

}  // namespace mamba
