// How logits are compared, and what is written once a token is chosen: the same in both libraries.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Of the bits of a float: integers in the order of the floats, with one zero, and NaN above all. static: mamba_cpu compiles
// these once per instruction set.
static MAMBA_HOST_DEVICE inline uint32_t ordered_logit(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t ordered = bits == magnitude ? bits | 0x80000000u : ~bits;
    return magnitude > 0x7f800000u ? 0xffffffffu : magnitude == 0 ? 0x80000000u : ordered;
}

static MAMBA_HOST_DEVICE inline void take_token(const MambaGreedyToken& p, int64_t row, int64_t token) {
    if (p.ended != nullptr) {
        token = p.ended[row] ? p.eos[0] : token;
        for (int i = 0; i < p.eos_count && !p.ended[row]; ++i) {
            p.ended[row] = p.eos[i] == token;
        }
    }
    p.tokens[row] = token;
    if (p.sequences != nullptr) {
        p.sequences[row * p.sequences_row_stride + p.ends[row]] = token;
    }
    if (p.ends != nullptr) {
        ++p.ends[row];
    }
    if (p.positions != nullptr) {
        ++p.positions[row];
    }
    if (p.lengths != nullptr) {
        ++p.lengths[row];
    }
}

}  // namespace mamba
