// What norm/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Floats of one array of `count` in the scratch memory: arrays begin at whole vectors of any instruction set.
inline int64_t norm_pitch(int64_t count) {
    return round_up(count, 16);
}
// Floats that one thread needs: weight, bias, and a group of a row; backward: sums of dweight and dbias first, and two groups.
inline int64_t norm_forward_scratch(const MambaNorm& p) {
    return 2 * norm_pitch(p.ngroups * p.group_size) + norm_pitch(p.group_size);
}
inline int64_t norm_backward_scratch(const MambaNorm& p) {
    return 4 * norm_pitch(p.ngroups * p.group_size) + 2 * norm_pitch(p.group_size);
}

struct NormKernels {
    // Rows [begin, end).
    void (*forward)(const MambaNorm& params, int64_t begin, int64_t end, float* scratch);
    // Rows [begin, end); leaves their sums of dweight and dbias at the beginning of scratch.
    void (*backward)(const MambaNormBackward& params, int64_t begin, int64_t end, float* scratch);
    // dweight and dbias from the sums of all threads, whose scratch memories lie `pitch` floats apart.
    void (*add_shares)(const MambaNormBackward& params, int64_t shares, int64_t pitch, float* scratch);
    void (*swiglu_forward)(const MambaSwiglu& params, int64_t begin, int64_t end);
    void (*swiglu_backward)(const MambaSwiglu& params, int64_t begin, int64_t end);
};

namespace generic {
extern const NormKernels norm_kernels;
}
namespace avx2 {
extern const NormKernels norm_kernels;
}
namespace avx512 {
extern const NormKernels norm_kernels;
}

}  // namespace mamba
