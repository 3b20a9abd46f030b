// The cross entropy on the CPU: a row is read for its sums, and once more for the gradient that takes its place.
#pragma once

#include <math.h>

#include "common/cpu_tile.h"
#include "cross_entropy/cpu/kernels.h"
#include "cross_entropy/row.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kLogitVectors = 4;  // that share a largest logit in each lane, so that sums are scaled once for all

// exp(difference) for a difference of at most 0; NaN stays NaN.
MAMBA_INLINE Vec exp_of(Vec difference) {
    return exp2(difference * set1(1.44269504f));
}

// Of the logits that each lane has seen, or a whole row has.
template <typename Value>
struct LogitSums {
    Value max;    // the largest; finite before any, so that -inf is no difference from it
    Value sum;    // of exp(l - max)
    Value above;  // of l - shift, where labels are smoothed
};

template <int kCount>
MAMBA_INLINE void add_logits(LogitSums<Vec>& sums, const Vec* x) {
    Vec largest = sums.max;
    for (int i = 0; i < kCount; ++i) {
        largest = maximum(x[i], largest);
    }
    sums.sum = sums.sum * exp_of(sums.max - largest);
    for (int i = 0; i < kCount; ++i) {
        sums.sum = sums.sum + exp_of(x[i] - largest);
    }
    sums.max = largest;
}

// Elements [first, first + kLanes) of a row, `beyond` after its end.
template <typename T>
MAMBA_INLINE Vec load_logits(const T* row, int64_t first, int64_t size, float beyond) {
    const int lanes = block_lanes(size - first);
    if (lanes == kLanes) {
        return load(row + first);
    }
    float x[kLanes];
    store(x, load_partial(row + first, lanes));
    for (int i = lanes; i < kLanes; ++i) {
        x[i] = beyond;
    }
    return load(x);
}

// shift: near the logits, so that their sum is not rounded to their size times their number.
template <typename T>
inline LogitSums<float> sum_row(const T* row, int64_t size, bool smooth, float shift) {
    LogitSums<Vec> sums = {set1(-3.402823466e38f), zero(), zero()};
    int64_t first = 0;
    for (; first + kLogitVectors * kLanes <= size; first += kLogitVectors * kLanes) {
        Vec x[kLogitVectors];
        for (int i = 0; i < kLogitVectors; ++i) {
            x[i] = load(row + first + i * kLanes);
        }
        add_logits<kLogitVectors>(sums, x);
        for (int i = 0; i < kLogitVectors && smooth; ++i) {
            sums.above = sums.above + (x[i] - set1(shift));
        }
    }
    for (; first < size; first += kLanes) {
        const Vec x = load_logits(row, first, size, -INFINITY);
        add_logits<1>(sums, &x);
        if (smooth) {
            sums.above = sums.above + (load_logits(row, first, size, shift) - set1(shift));
        }
    }
    float largest[kLanes];
    store(largest, sums.max);
    float max = largest[0];
    for (const float lane : largest) {
        max = lane > max ? lane : max;
    }
    return {max, sum(sums.sum * exp_of(sums.max - set1(max))), sum(sums.above)};
}

template <typename T>
MAMBA_INLINE void store_gradient(T* row, int64_t first, int64_t size, Vec gradient) {
    const int lanes = block_lanes(size - first);
    if (lanes == kLanes) {
        store(row + first, gradient);
    } else {
        store_partial(row + first, gradient, lanes);
    }
}

template <typename T>
inline void fill_row(T* row, int64_t size, float value) {
    for (int64_t first = 0; first < size; first += kLanes) {
        store_gradient(row, first, size, set1(value));
    }
}

// Returns the loss.
template <typename T>
inline float cross_entropy_of(const MambaCrossEntropy& p, T* row, int64_t label) {
    const int64_t size = p.vocabulary;
    float lanes[kLanes];
    store(lanes, load_partial(row + label, 1));
    const float logit = lanes[0];
    const bool smooth = p.label_smoothing != 0.0f;
    const float shift = fabsf(logit) < INFINITY ? logit : 0.0f;
    const LogitSums<float> sums = sum_row(row, size, smooth, shift);
    const float mean = sums.above / static_cast<float>(size) + (shift - sums.max);
    const CrossEntropyRow result = cross_entropy_row(p, sums.max, sums.sum, logit, mean);
    if (p.gradient) {
        const Vec max = set1(sums.max), scale = set1(result.scale), offset = set1(-result.offset);
        for (int64_t first = 0; first < size; first += kLanes) {
            const Vec x = load_logits(row, first, size, 0.0f);
            store_gradient(row, first, size, fma(exp_of(x - max), scale, offset));
        }
        store_partial(row + label, set1(result.label), 1);
    }
    return result.loss;
}

template <typename T>
inline void cross_entropy_rows(const MambaCrossEntropy& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        T* const row = static_cast<T*>(p.logits) + r * p.logits_row_stride;
        const int64_t label = p.labels[r];
        if (label != p.ignore_index && label >= 0 && label < p.vocabulary) {
            p.losses[r] = cross_entropy_of(p, row, label);
            continue;
        }
        p.losses[r] = label == p.ignore_index ? 0.0f : NAN;
        if (p.gradient) {
            fill_row(row, p.vocabulary, p.losses[r]);
        }
    }
}

inline void cross_entropy(const MambaCrossEntropy& p, int64_t begin, int64_t end) {
    with_type(p.dtype,
              [&](auto type) MAMBA_INLINE_LAMBDA { cross_entropy_rows<typename decltype(type)::type>(p, begin, end); });
}

}  // namespace MAMBA_ISA
}  // namespace mamba
