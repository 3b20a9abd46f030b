// A matrix of any dtype times a few vectors: the matrix is read once for kSlabRows of them, and widened in registers.
#pragma once

#include "linear/cpu/vnni.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kSlabRows = 8;
constexpr int64_t kCachedFeatures = 6144;  // of x, 24 KB: as many again are left for the weight

// Outputs [first, first + count) of some rows; sums[row][output]. Many rows' features in pieces that the first cache holds.
template <class Weight, int kRows>
inline void project_rows(TilePlace& at, int64_t first, int count, float (*sums)[kLanes]) {
    constexpr int kOutputs = tile_outputs(kRows);
    const int64_t features = at.p->features, piece = kRows > 4 ? kCachedFeatures / kRows : features;
    TileSums tile;
    at.end = 0;
    do {
        at.begin = at.end;
        at.end = features - at.begin < piece ? features : at.begin + piece;
        for (int begin = 0; begin < count; begin += kOutputs) {
            const int outputs = count - begin < kOutputs ? count - begin : kOutputs;
            for (int o = 0; o < kOutputs; ++o) {
                at.outputs[o] = first + begin + (o < outputs ? o : outputs - 1);
            }
            Weight::template multiply<kRows, kOutputs>(at, tile);
            for (int r = 0; r < kRows; ++r) {
                for (int o = 0; o < outputs; ++o) {
                    sums[r][begin + o] = tile[r][o] + (at.begin > 0 ? sums[r][begin + o] : 0.0f);
                }
            }
        }
    } while (at.end < features);
}

// Bytes ahead of what is read. Short rows end before the processor has noticed a stream: then it is the next tile's rows.
inline int64_t bytes_ahead(int64_t row_bytes) {
    constexpr int64_t kMost = 16384;
    const int64_t tile = row_bytes * kMostTileOutputs;
    return tile < kMost ? tile : kMost;
}

// A weight of int8, with VNNI.
struct VnniWeight {};

template <class Weight>
struct RowProduct {
    template <int kRows>
    static void run(TilePlace& at, int64_t first, int count, float (*sums)[kLanes]) {
        project_rows<Weight, kRows>(at, first, count, sums);
    }
};
#if MAMBA_ISA_LEVEL == 2
template <>
struct RowProduct<VnniWeight> {
    template <int kRows>
    static void run(TilePlace& at, int64_t first, int count, float (*sums)[kLanes]) {
        project_vnni<kRows>(at, first, count, sums);
    }
};
#endif

template <class Weight>
inline void project_as(const Projection& p, const ProjectionInput& x, int64_t row_bytes, int64_t begin, int64_t end) {
    float sums[kSlabRows][kLanes];  // those beyond p.rows are of rows of zeros
    TilePlace at = {};
    at.p = &p;
    at.x = &x;
    at.ahead = bytes_ahead(row_bytes);
    for (int64_t slab = 0; slab < p.rows; slab += kSlabRows) {
        const int rows = p.rows - slab < kSlabRows ? static_cast<int>(p.rows - slab) : kSlabRows;
        for (int64_t first = begin; first < end; first += kLanes) {
            const int count = block_lanes(end - first);
            int row = 0;
            while (row < rows) {
                at.row = slab + row;
                if (kMostTileRows == 8 && rows - row > 4) {
                    RowProduct<Weight>::template run<kMostTileRows>(at, first, count, sums + row);
                    row += 8;
                } else if (rows - row >= (kMostTileRows == 8 ? 3 : 4)) {
                    RowProduct<Weight>::template run<4>(at, first, count, sums + row);
                    row += 4;
                } else if (rows - row >= 2) {
                    RowProduct<Weight>::template run<2>(at, first, count, sums + row);
                    row += 2;
                } else {
                    RowProduct<Weight>::template run<1>(at, first, count, sums + row);
                    row += 1;
                }
            }
            const Vec bias = p.bias != nullptr ? load_lanes(p.bias_dtype, p.bias, first, 1, count) : zero();
            for (int r = 0; r < rows; ++r) {
                const Vec value = load_lanes(MAMBA_FLOAT32, sums[r], 0, 1, count) + bias;
                store_lanes(p.out_dtype, p.out, (slab + r) * p.out_stride + first, 1, count, value);
            }
        }
    }
}

inline void project_outputs(const Projection& p, const ProjectionInput& x, int64_t begin, int64_t end) {
    if (p.weight_dtype == MAMBA_FLOAT32) {
        project_as<FloatWeight<float>>(p, x, p.features * 4, begin, end);
    }
#if MAMBA_ISA_LEVEL == 2
    if (x.bytes != nullptr) {
        project_as<VnniWeight>(p, x, p.features, begin, end);
        return;
    }
#endif
    if (p.weight_dtype == MAMBA_INT8 && x.integers != nullptr) {
        project_as<Int8Weight<true>>(p, x, p.features, begin, end);
    } else if (p.weight_dtype == MAMBA_INT8) {
        project_as<Int8Weight<false>>(p, x, p.features, begin, end);
    }
#ifndef MAMBA_DISABLE_HALF
    if (p.weight_dtype == MAMBA_FLOAT16) {
        project_as<FloatWeight<Half>>(p, x, p.features * 2, begin, end);
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (p.weight_dtype == MAMBA_BFLOAT16) {
        project_as<FloatWeight<Bfloat16>>(p, x, p.features * 2, begin, end);
    }
#endif
}

}  // namespace MAMBA_ISA
}  // namespace mamba
