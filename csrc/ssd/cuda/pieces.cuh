// The states that reach the pieces of a scan, on the GPU: a thread walks an element of the state through all pieces.
#pragma once

#include "common/cuda_utils.cuh"

namespace mamba {
namespace {

constexpr int kPiecesThreads = 256;
constexpr int kPiecesAtOnce = 8;  // whose reads are under way together

// threads: of a head, an element of the state each; at least one, which has the product of the factors.
__global__ void __launch_bounds__(kPiecesThreads) ssd_pieces_kernel(const MambaSsdCarry p, int64_t threads) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kPiecesThreads + threadIdx.x;
    const int64_t row = thread / threads, element = thread - row * threads;
    if (row >= p.batch * p.nheads) {
        return;
    }
    const int64_t batch = row / p.nheads, head = row - batch * p.nheads;
    const bool inside = element < p.state_size;
    const int64_t at = row * p.state_size + element;
    const float* const passed = p.passed + batch * p.passed_batch_stride + head * p.state_size + element;
    const float* const factors = p.factors + batch * p.factors_batch_stride + head * p.factors_head_stride;
    float* const before = inside && p.before != nullptr
                              ? p.before + batch * p.pieces * p.nheads * p.state_size + head * p.state_size + element
                              : nullptr;
    float state = inside && p.initial != nullptr ? p.initial[at] : 0.0f;
    float product = 1.0f;
    for (int64_t first = 0; first < p.pieces; first += kPiecesAtOnce) {
        float factor[kPiecesAtOnce], end[kPiecesAtOnce];
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; ++i) {
            if (first + i < p.pieces) {
                const int64_t piece = p.reverse ? p.pieces - 1 - first - i : first + i;
                factor[i] = factors[piece * p.factors_piece_stride];
                end[i] = inside ? passed[piece * p.passed_piece_stride] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; ++i) {
            if (first + i < p.pieces) {
                const int64_t piece = p.reverse ? p.pieces - 1 - first - i : first + i;
                if (before != nullptr) {
                    before[piece * p.nheads * p.state_size] = state;
                }
                // A state of zero stays zero even where the factor has overflowed, as it would step by step.
                state = state == 0.0f ? end[i] : fmaf(factor[i], state, end[i]);
                product *= factor[i];
            }
        }
    }
    if (inside && p.last != nullptr) {
        p.last[at] = state;
    }
    if (element == 0 && p.product != nullptr) {
        p.product[row] = product;
    }
}

cudaError_t launch_pieces(const MambaSsdCarry& p) {
    const int64_t threads = p.state_size > 0 ? p.state_size : 1;
    const int64_t blocks = ceil_div(p.batch * p.nheads * threads, kPiecesThreads);
    return launch_kernel(ssd_pieces_kernel, blocks, kPiecesThreads, 0, p.run.stream, p, threads);
}

}  // namespace
}  // namespace mamba
