// Greedy decoding's choice: the largest logit of each row.
#pragma once

#include "common/cpu_tile.h"
#include "linear/greedy.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kGreedyChunk = 256;  // logits whose largest is found before it is looked up

template <typename T>
inline int64_t largest_logit(const T* row, int64_t size) {
    uint32_t most = 0;
    int64_t token = 0;
    for (int64_t first = 0; first < size; first += kGreedyChunk) {
        float logits[kGreedyChunk];
        uint32_t ordered[kGreedyChunk], largest = 0;
        const int count = static_cast<int>(size - first < kGreedyChunk ? size - first : kGreedyChunk);
        for (int i = 0; i < count; i += kLanes) {
            const int lanes = block_lanes(count - i);
            store(logits + i, lanes == kLanes ? load(row + first + i) : load_partial(row + first + i, lanes));
        }
        memcpy(ordered, logits, sizeof(uint32_t) * static_cast<size_t>(count));
        for (int i = 0; i < count; ++i) {  // compilers make vectors of these two loops, not of one
            ordered[i] = ordered_logit(ordered[i]);
        }
        for (int i = 0; i < count; ++i) {
            const uint32_t logit = ordered[i];
            largest = logit > largest ? logit : largest;
        }
        if (largest > most) {
            most = largest;
            token = first;
            while (ordered[token - first] != largest) {
                ++token;
            }
        }
    }
    return token;
}

inline void greedy_token(const MambaGreedyToken& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        for (int64_t row = begin; row < end; ++row) {
            take_token(p, row, largest_logit(static_cast<const T*>(p.logits) + row * p.logits_row_stride, p.vocabulary));
        }
    });
}

}  // namespace MAMBA_ISA
}  // namespace mamba
