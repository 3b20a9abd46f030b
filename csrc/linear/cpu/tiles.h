// Tiles of a product: a few rows of x times a few of the weight, all of the features, with the sums in registers.
#pragma once

#include "linear/cpu/input.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kMostTileRows = MAMBA_ISA_LEVEL == 2 ? 8 : 4;  // as many as registers hold the sums of
constexpr int kMostTileOutputs = 4;
constexpr int kCacheLine = 64;

// Rows of the weight in a tile.
constexpr int tile_outputs(int rows) {
    return MAMBA_ISA_LEVEL == 2 ? (rows == 8 ? 2 : 4) : MAMBA_ISA_LEVEL == 1 ? (rows == 4 ? 2 : 4) : rows == 4 ? 1 : 2;
}

struct TilePlace {
    const Projection* p;
    const ProjectionInput* x;
    int64_t row;
    int64_t outputs[kMostTileOutputs];  // which; an output may be there twice
    int64_t begin, end;                 // of the features, begin a multiple of kFeatureBlock
    int64_t ahead;                      // bytes from what is read to what is fetched into the cache meanwhile
};

// What the sums of a tile go to: sums[row][output].
typedef float TileSums[kMostTileRows][kMostTileOutputs];

template <int kRows, int kOutputs>
MAMBA_INLINE void store_sums(const Vec (&totals)[kRows][kOutputs], TileSums sums) {
    constexpr int kCount = kRows * kOutputs;
    Vec flat[kCount];
    float values[kCount];
    for (int r = 0; r < kRows; ++r) {
        for (int o = 0; o < kOutputs; ++o) {
            flat[r * kOutputs + o] = totals[r][o];
        }
    }
    int i = 0;
    for (; i + kLanes <= kCount; i += kLanes) {
        store(values + i, sum_each(flat + i));
    }
    for (; i < kCount; ++i) {
        values[i] = sum(flat[i]);
    }
    for (int r = 0; r < kRows; ++r) {
        for (int o = 0; o < kOutputs; ++o) {
            sums[r][o] = values[r * kOutputs + o];
        }
    }
}

// A vector that several products take. gcc would load it from memory for each of them.
MAMBA_INLINE Vec load_once(const float* data) {
    Vec value = load(data);
#if defined(__GNUC__) && MAMBA_ISA_LEVEL > 0
    __asm__("" : "+v"(value.v));  // NOLINT(msvc): the branch for other compilers
#endif
    return value;
}

// A weight of floats of any width.
template <typename W>
struct FloatWeight {
    template <int kRows, int kOutputs>
    static void multiply(const TilePlace& at, TileSums sums) {
        const int64_t features = at.p->features, pitch = at.x->pitch;
        const float* const x = at.x->floats + at.row * pitch;
        const W* weight[kOutputs];
        Vec totals[kRows][kOutputs], others[kRows][kOutputs];  // so that one addition need not wait for the last
        for (int o = 0; o < kOutputs; ++o) {
            weight[o] = static_cast<const W*>(at.p->weight) + at.outputs[o] * features;
            for (int r = 0; r < kRows; ++r) {
                totals[r][o] = others[r][o] = zero();
            }
        }
        Vec first, second;
        int64_t i = at.begin;
        for (; i + kFeatureBlock <= at.end; i += kFeatureBlock) {
            for (int o = 0; o < kOutputs; ++o) {
                for (int line = 0; line < kFeatureBlock * static_cast<int>(sizeof(W)); line += kCacheLine) {
                    prefetch(reinterpret_cast<const char*>(weight[o] + i) + at.ahead + line);
                }
            }
            for (int part = 0; part < kFeatureBlock; part += 2 * kLanes) {
                const float* const x_part = x + i + part;
                if (kRows > kOutputs) {  // the fewer vectors stay in registers
                    Vec firsts[kOutputs], seconds[kOutputs];
                    for (int o = 0; o < kOutputs; ++o) {
                        load_pair(weight[o] + i + part, firsts[o], seconds[o]);
                    }
                    for (int r = 0; r < kRows; ++r) {
                        const Vec x_first = load_once(x_part + r * pitch), x_second = load_once(x_part + r * pitch + kLanes);
                        for (int o = 0; o < kOutputs; ++o) {
                            totals[r][o] = fma(seconds[o], x_second, fma(firsts[o], x_first, totals[r][o]));
                        }
                    }
                    continue;
                }
                Vec x_first[kRows], x_second[kRows];
                for (int r = 0; r < kRows; ++r) {
                    x_first[r] = load_once(x_part + r * pitch);
                    x_second[r] = load_once(x_part + r * pitch + kLanes);
                }
                for (int o = 0; o < kOutputs; ++o) {
                    load_pair(weight[o] + i + part, first, second);
                    for (int r = 0; r < kRows; ++r) {
                        Vec& other = kRows == 1 ? others[r][o] : totals[r][o];
                        totals[r][o] = fma(first, x_first[r], totals[r][o]);
                        other = fma(second, x_second[r], other);
                    }
                }
            }
        }
        for (; i < at.end; i += 2 * kLanes) {
            const int64_t left = at.end - i;
            for (int o = 0; o < kOutputs; ++o) {
                if (left < 2 * kLanes) {
                    load_pair_partial(weight[o] + i, static_cast<int>(left), first, second);
                } else {
                    load_pair(weight[o] + i, first, second);
                }
                for (int r = 0; r < kRows; ++r) {
                    totals[r][o] = fma(first, load(x + r * pitch + i), totals[r][o]);
                    totals[r][o] = fma(second, load(x + r * pitch + i + kLanes), totals[r][o]);
                }
            }
        }
        for (int r = 0; r < kRows && kRows == 1; ++r) {
            for (int o = 0; o < kOutputs; ++o) {
                totals[r][o] = totals[r][o] + others[r][o];
            }
        }
        store_sums(totals, sums);
    }
};

// ---- a weight of int8 ------------------------------------------------------------------------------------------------

constexpr int kScaleBlocks = 64;  // whose scales are widened at a time

// A block of a row of the weight: of the last one, which may be short, a copy with zeros.
MAMBA_INLINE const int8_t* block_at(const int8_t* weight, int64_t first, int64_t features, int8_t* copy) {
    const int64_t left = features - first;
    if (left >= kFeatureBlock) {
        return weight + first;
    }
    memset(copy, 0, kFeatureBlock);
    memcpy(copy, weight + first, static_cast<size_t>(left));
    return copy;
}

// The weight's scales of some blocks of a row, times x's if there are any.
inline void load_scales(const Half* weight_scales, const float* x_scales, int count, float* scales) {
    for (int i = 0; i < count; i += kLanes) {
        const int lanes = count - i < kLanes ? count - i : kLanes;
        const Vec value = lanes == kLanes ? load(weight_scales + i) : load_partial(weight_scales + i, lanes);
        const Vec x = x_scales == nullptr ? set1(1.0f)
                      : lanes == kLanes   ? load(x_scales + i)
                                          : load_partial(x_scales + i, lanes);
        store(scales + i, value * x);
    }
}

// Of a tile: kIntegers, x's integers times the weight's, exactly, and for each block the scales; or else floats.
template <bool kIntegers>
struct Int8Weight {
    template <int kRows, int kOutputs>
    static void multiply(const TilePlace& at, TileSums sums) {
        const int64_t features = at.p->features, pitch = at.x->pitch, blocks = pitch / kFeatureBlock;
        const int8_t* weight[kOutputs];
        const Half* weight_scales[kOutputs];
        Vec totals[kRows][kOutputs];
        for (int o = 0; o < kOutputs; ++o) {
            weight[o] = static_cast<const int8_t*>(at.p->weight) + at.outputs[o] * features;
            weight_scales[o] = static_cast<const Half*>(at.p->scales) + at.outputs[o] * blocks;
            for (int r = 0; r < kRows; ++r) {
                totals[r][o] = zero();
            }
        }
        constexpr int kScaleRows = kIntegers ? kRows : 1;
        float scales[kScaleRows][kOutputs][kScaleBlocks + kLanes];
        int8_t copy[kFeatureBlock];
        const int64_t end = (at.end + kFeatureBlock - 1) / kFeatureBlock;
        for (int64_t begin = at.begin / kFeatureBlock; begin < end; begin += kScaleBlocks) {
            const int count = end - begin < kScaleBlocks ? static_cast<int>(end - begin) : kScaleBlocks;
            for (int o = 0; o < kOutputs; ++o) {
                for (int r = 0; r < kScaleRows; ++r) {
                    const float* const x_scales = kIntegers ? at.x->scales + (at.row + r) * blocks + begin : nullptr;
                    load_scales(weight_scales[o] + begin, x_scales, count, scales[r][o]);
                }
            }
            for (int block = 0; block < count; ++block) {
                const int64_t first = (begin + block) * kFeatureBlock, x_first = at.row * pitch + first;
                Vec wide[kOutputs][kFeatureBlock / kLanes];
                for (int o = 0; o < kOutputs; ++o) {
                    prefetch(reinterpret_cast<const char*>(weight[o] + first) + at.ahead);
                    const int8_t* const data = block_at(weight[o], first, features, copy);
                    if (kIntegers) {
                        const Int8Block wide = load_block(data);
                        for (int r = 0; r < kRows; ++r) {
                            const Vec products = multiply_block(wide, at.x->integers + x_first + r * pitch);
                            totals[r][o] = fma(products, set1(scales[r % kScaleRows][o][block]), totals[r][o]);
                        }
                        continue;
                    }
                    for (int i = 0; i < kFeatureBlock / kLanes; ++i) {
                        wide[o][i] = load(data + i * kLanes) * set1(scales[0][o][block]);
                    }
                }
                for (int r = 0; r < kRows && !kIntegers; ++r) {
                    const float* const x = at.x->floats + x_first + r * pitch;
                    for (int i = 0; i < kFeatureBlock / kLanes; ++i) {
                        const Vec x_part = load_once(x + i * kLanes);
                        for (int o = 0; o < kOutputs; ++o) {
                            totals[r][o] = fma(wide[o][i], x_part, totals[r][o]);
                        }
                    }
                }
            }
        }
        store_sums(totals, sums);
    }
};

}  // namespace MAMBA_ISA
}  // namespace mamba
