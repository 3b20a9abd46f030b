// From a row's sums to its loss and gradient: the same in both libraries.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

struct CrossEntropyRow {
    float loss;
    float scale, offset;  // gradient_j = exp(l_j - max) scale - offset, but for the label's
    float label;          // the label's own entry
};

// max: the largest logit. sum: of exp(l_j - max). logit: the label's. mean: of l_j - max, read where labels are smoothed.
// Nothing is rounded to the size of the logits but lse. static: mamba_cpu compiles it once per instruction set.
static MAMBA_HOST_DEVICE inline CrossEntropyRow cross_entropy_row(const MambaCrossEntropy& p, float max, float sum, float logit,
                                                                  float mean) {
    const float smooth = p.label_smoothing, share = smooth / static_cast<float>(p.vocabulary);
    const float log_sum = logf(sum), lse = max + log_sum;
    const float log_prob = (logit - max) - log_sum;
    const float slope = 2.0f * p.z_loss * lse;
    CrossEntropyRow row;
    row.loss = p.z_loss * lse * lse - (1.0f - smooth) * log_prob;
    if (smooth != 0.0f) {
        row.loss -= smooth * (mean - log_sum);
    }
    row.scale = (1.0f + slope) / sum;
    row.offset = share;
    // In float32 and by expm1: a probability near 1 would be rounded to 1, and its gradient to 0.
    row.label = expm1f(log_prob) + slope * expf(log_prob) + smooth - share;
    return row;
}

}  // namespace mamba
