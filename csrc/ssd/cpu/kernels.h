// What ssd/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Steps that are worked on together: within a chunk the scan is a product of matrices, between chunks a state is passed on.
constexpr int64_t kSsdChunk = 64;
// Heads that one forward segment takes, so that their states stay in a core's own cache.
constexpr int64_t kSsdSegmentHeads = 16;

// The unit of work forward: some heads of one group of one batch entry, and some columns of their headdim, over the length.
struct SsdSegment {
    int64_t batch, head, heads;
    int64_t column, columns;
};

// What backward keeps between its two passes, which it makes for some heads of some batch entries at a time.
struct SsdBackwardSpace {
    int64_t first_batch, first_head, heads, chunks;
    float* states;     // (entries, heads, chunks, P, pitch of N): the states that enter a chunk
    float* gradients;  // (entries, heads, chunks, N, pitch of P): gradients of the states that leave a chunk
    float* partial;    // (G, chunks, 2, steps, pitch of N): dB and dC of the heads that came before
    float* sums;       // (B, chunks, H, 2 + P): each chunk's share of dA, ddt_bias and dD
};

struct SsdKernels {
    int64_t lanes;
    // Floats of scratch memory.
    int64_t (*forward_scratch)(const MambaSsd& params, int64_t heads, int64_t columns);
    int64_t (*backward_scratch)(const MambaSsd& params);
    void (*forward)(const MambaSsd& params, const SsdSegment& segment, float* scratch);
    // First pass, for one head: the states, or their gradients, at every chunk's border.
    void (*backward_states)(const MambaSsdBackward& params, const SsdBackwardSpace& space, int64_t batch, int64_t head,
                            float* scratch);
    void (*backward_gradients)(const MambaSsdBackward& params, const SsdBackwardSpace& space, int64_t batch, int64_t head,
                               float* scratch);
    // Second pass, for one chunk: everything else, for those of the heads that are in this group.
    void (*backward_chunk)(const MambaSsdBackward& params, const SsdBackwardSpace& space, int64_t batch, int64_t group,
                           int64_t chunk, float* scratch);
};

namespace generic {
extern const SsdKernels ssd_kernels;
}
namespace avx2 {
extern const SsdKernels ssd_kernels;
}
namespace avx512 {
extern const SsdKernels ssd_kernels;
}

}  // namespace mamba
