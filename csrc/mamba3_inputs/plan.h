// How what Mamba-3's scan takes is prepared on CUDA: rows of a block of backward, and its workspace.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

constexpr int kMamba3InputsBackwardRows = 32;

// Where blocks leave their parts of the parameters' gradients, in floats.
struct Mamba3InputsWorkspace {
    int64_t blocks;
    int64_t q_weight, k_weight;  // (blocks, N)
    int64_t dt_bias;             // (blocks, H)
    int64_t floats;

    explicit Mamba3InputsWorkspace(const MambaMamba3Inputs& p)
        : blocks(ceil_div(p.rows, kMamba3InputsBackwardRows)),
          q_weight(0),
          k_weight(blocks * p.dstate),
          dt_bias(2 * blocks * p.dstate),
          floats(dt_bias + blocks * p.nheads) {}
};

}  // namespace mamba
