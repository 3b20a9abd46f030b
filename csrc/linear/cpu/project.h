// A matrix of any dtype times a few vectors: the matrix is read once for kSlabRows of them, and widened in registers.
#pragma once

#include "linear/cpu/vnni.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kSlabRows = 8;
constexpr int64_t kCachedFeatures = 6144;  // of x, 24 KB: as many again are left for the weight

constexpr int kParts = 4;  // as many as a tile has rows of the weight, or a multiple

// Bytes from what is read to what is fetched into the cache meanwhile: of rows behind it, some of whose features may be read
// later.
inline int64_t bytes_ahead(int64_t row_bytes) {
    constexpr int64_t kLeast = 2048;
    return round_up(kLeast, row_bytes > 0 ? row_bytes : 1);
}

// The outputs of a share in parts, from each of which a tile takes one: memory brings more of several places than of one, each
// read from one end to the other.
struct OutputParts {
    int64_t begin, end, size;

    // Output i of a part; of the last one, where parts end beyond it.
    int64_t place(int part, int64_t i) const {
        const int64_t output = begin + part * size + i;
        return output < end ? output : end - 1;
    }
    // How many of the outputs [first, first + most) of a part there are.
    int count(int part, int64_t first, int most) const {
        const int64_t left = end - (begin + part * size + first);
        return left < most ? (left > 0 ? static_cast<int>(left) : 0) : most;
    }
};

// Of a row of x.
typedef float PartSums[kParts][kLanes];

// Outputs [first, first + count) of each part, of some rows. Many rows' features in pieces that the first cache holds.
template <class Weight, int kRows>
inline void project_rows(TilePlace& at, const OutputParts& outputs, int64_t first, int count, PartSums* sums) {
    constexpr int kOutputs = tile_outputs(kRows);
    const int64_t features = at.p->features, piece = kRows > 4 ? kCachedFeatures / kRows : features;
    TileSums tile;
    at.end = 0;
    do {
        at.begin = at.end;
        at.end = features - at.begin < piece ? features : at.begin + piece;
        for (int part = 0; part < kParts; part += kOutputs) {
            for (int i = 0; i < count; ++i) {
                for (int o = 0; o < kOutputs; ++o) {
                    at.outputs[o] = outputs.place(part + o, first + i);
                }
                Weight::template multiply<kRows, kOutputs>(at, tile);
                for (int r = 0; r < kRows; ++r) {
                    for (int o = 0; o < kOutputs; ++o) {
                        float& sum = sums[r][part + o][i];
                        sum = tile[r][o] + (at.begin > 0 ? sum : 0.0f);
                    }
                }
            }
        }
    } while (at.end < features);
}

// A weight of int8, with VNNI.
struct VnniWeight {};

template <class Weight>
struct RowProduct {
    static constexpr int kUsedParts = kParts;
    template <int kRows>
    static void run(TilePlace& at, const OutputParts& outputs, int64_t first, int count, PartSums* sums) {
        project_rows<Weight, kRows>(at, outputs, first, count, sums);
    }
};
#if MAMBA_ISA_LEVEL == 2
template <>
struct RowProduct<VnniWeight> {
    static constexpr int kUsedParts = 1;
    template <int kRows>
    static void run(TilePlace& at, const OutputParts& outputs, int64_t first, int count, PartSums* sums) {
        project_vnni<kRows>(at, outputs.place(0, first), count, sums[0][0], kParts * kLanes);
    }
};
#endif

template <class Weight>
inline void project_as(const Projection& p, const ProjectionInput& x, int64_t row_bytes, int64_t begin, int64_t end) {
    constexpr int kUsedParts = RowProduct<Weight>::kUsedParts;
    PartSums sums[kSlabRows];  // those beyond p.rows are of rows of zeros
    TilePlace at = {};
    at.p = &p;
    at.x = &x;
    at.ahead = bytes_ahead(row_bytes);
    const OutputParts outputs = {begin, end, (end - begin + kUsedParts - 1) / kUsedParts};
    for (int64_t slab = 0; slab < p.rows; slab += kSlabRows) {
        const int rows = p.rows - slab < kSlabRows ? static_cast<int>(p.rows - slab) : kSlabRows;
        for (int64_t first = 0; first < outputs.size; first += kLanes) {
            const int most = block_lanes(outputs.size - first);
            int row = 0;
            while (row < rows) {
                at.row = slab + row;
                if (kMostTileRows == 8 && rows - row > 4) {
                    RowProduct<Weight>::template run<kMostTileRows>(at, outputs, first, most, sums + row);
                    row += 8;
                } else if (rows - row >= (kMostTileRows == 8 ? 3 : 4)) {
                    RowProduct<Weight>::template run<4>(at, outputs, first, most, sums + row);
                    row += 4;
                } else if (rows - row >= 2) {
                    RowProduct<Weight>::template run<2>(at, outputs, first, most, sums + row);
                    row += 2;
                } else {
                    RowProduct<Weight>::template run<1>(at, outputs, first, most, sums + row);
                    row += 1;
                }
            }
            for (int part = 0; part < kUsedParts; ++part) {
                const int count = outputs.count(part, first, most);
                if (count == 0) {
                    break;
                }
                const int64_t output = outputs.place(part, first);
                const Vec bias = p.bias != nullptr ? load_lanes(p.bias_dtype, p.bias, output, 1, count) : zero();
                for (int r = 0; r < rows; ++r) {
                    const Vec value = load_lanes(MAMBA_FLOAT32, sums[r][part], 0, 1, count) + bias;
                    store_lanes(p.out_dtype, p.out, (slab + r) * p.out_stride + output, 1, count, value);
                }
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
