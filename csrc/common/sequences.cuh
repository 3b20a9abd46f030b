// Sequences of a batch, or packed into one row (cu_seqlens), whose steps are taken in chunks.
#pragma once

#include <stdint.h>

#include "common/integers.h"

namespace mamba {

// The steps of a sequence.
struct SequenceRange {
    int64_t row;  // of the tensors
    int64_t begin, seqlen;
};

// Whatever is in cu_seqlens, memory beyond the row is not touched.
template <class Params>
__device__ __forceinline__ SequenceRange sequence_range(const Params& p, int64_t sequence) {
    if (p.cu_seqlens == nullptr) {
        return {sequence, 0, p.seqlen};
    }
    const int64_t begin = p.cu_seqlens[sequence] < 0 ? 0 : p.cu_seqlens[sequence];
    const int64_t end = p.cu_seqlens[sequence + 1] > p.seqlen ? p.seqlen : p.cu_seqlens[sequence + 1];
    return {0, begin, end > begin ? end - begin : 0};
}

// Where the values of a sequence's first chunk lie. Packed sequences begin anywhere: their chunks never reach the next one's
// slots, since ceil(seqlen / steps) <= end / steps - begin / steps + 1.
template <class Params>
__device__ __forceinline__ int64_t slot_of_sequence(const Params& p, int64_t steps, int64_t sequence, int64_t begin) {
    return p.cu_seqlens == nullptr ? sequence * ceil_div(p.seqlen, steps) : begin / steps + sequence;
}

// The last of so many sequences whose slots begin at this one or earlier.
template <class Params>
__device__ __forceinline__ int64_t sequence_of_slot(const Params& p, int64_t steps, int64_t sequences, int64_t slot) {
    if (p.cu_seqlens == nullptr) {
        return slot / ceil_div(p.seqlen, steps);
    }
    int64_t sequence = 0;
    while (sequences - sequence > 1) {
        const int64_t middle = (sequence + sequences) / 2;
        (slot_of_sequence(p, steps, middle, sequence_range(p, middle).begin) <= slot ? sequence : sequences) = middle;
    }
    return sequence;
}

}  // namespace mamba
