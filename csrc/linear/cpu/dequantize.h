// Rows of an int8 weight as numbers of the activations' dtype.
#pragma once

#include "common/cpu_tile.h"
#include "linear/cpu/tiles.h"
#include "linear/dequantize.h"

namespace mamba {
namespace MAMBA_ISA {

template <typename T>
inline void dequantize_row(const int8_t* weight, const Half* scales, int64_t features, T* out) {
    float block_scales[kScaleBlocks + kLanes];
    int8_t copy[kFeatureBlock];
    for (int64_t first = 0; first < features; first += kFeatureBlock) {
        const int64_t block = first / kFeatureBlock, blocks = (features - first + kFeatureBlock - 1) / kFeatureBlock;
        if (block % kScaleBlocks == 0) {
            load_scales(scales + block, nullptr, static_cast<int>(blocks < kScaleBlocks ? blocks : kScaleBlocks), block_scales);
        }
        const Vec scale = set1(block_scales[block % kScaleBlocks]);
        const int8_t* const data = block_at(weight, first, features, copy);
        for (int64_t i = 0; i < kFeatureBlock && first + i < features; i += kLanes) {
            const Vec value = load(data + i) * scale;
            const int lanes = block_lanes(features - first - i);
            if (lanes == kLanes) {
                store(out + first + i, value);
            } else {
                store_partial(out + first + i, value, lanes);
            }
        }
    }
}

template <typename T>
inline void dequantize_as(const MambaDequantize& p, int64_t begin, int64_t end) {
    const int64_t blocks = (p.features + kFeatureBlock - 1) / kFeatureBlock;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t source = dequantized_row(p, row);
        dequantize_row(static_cast<const int8_t*>(p.weight) + source * p.features,
                       static_cast<const Half*>(p.scales) + source * blocks, p.features,
                       static_cast<T*>(p.out) + row * p.features);
    }
}

inline void dequantize(const MambaDequantize& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto type) MAMBA_INLINE_LAMBDA { dequantize_as<typename decltype(type)::type>(p, begin, end); });
}

}  // namespace MAMBA_ISA
}  // namespace mamba
