// Products of small float matrices whose tiles lie in a core's caches: blocks of rows and vectors of columns in registers.
#pragma once

#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kProductRows = 4;
// Vectors of columns in a block: with their sums they take most of the instruction set's registers.
constexpr int kProductVecs = MAMBA_ISA_LEVEL == 2 ? 4 : MAMBA_ISA_LEVEL == 1 ? 2 : 1;

// out[row][column] = sum over depth of left(row, depth) * right[depth][column] + scale * in[row][column].
// left is read one element at a time, by any strides; right, in and out are read and written in whole vectors of columns.
// scale 0: in is not read. in and out may be the same.
struct Product {
    const float* left;
    int64_t left_row, left_depth;
    const float* right;
    int64_t right_pitch;
    const float* in;
    float scale;
    float* out;
    int64_t out_pitch;
};

// kLower: behind the full depth come the block's own rows, of which each takes its predecessors and itself.
template <int kRows, int kVecs, bool kLower>
MAMBA_INLINE void product_block(const Product& p, int64_t row, int64_t column, int64_t depth) {
    Vec sums[kRows][kVecs];
    for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kVecs; ++j) {
            sums[i][j] = zero();
        }
    }
    const float* left = p.left + row * p.left_row;
    const float* right = p.right + column;
    for (int64_t k = 0; k < depth; ++k) {
        Vec values[kVecs];
        for (int j = 0; j < kVecs; ++j) {
            values[j] = load(right + j * kLanes);
        }
        for (int i = 0; i < kRows; ++i) {
            const Vec factor = set1(left[i * p.left_row]);
            for (int j = 0; j < kVecs; ++j) {
                sums[i][j] = fma(factor, values[j], sums[i][j]);
            }
        }
        left += p.left_depth;
        right += p.right_pitch;
    }
    if (kLower) {
        for (int k = 0; k < kRows; ++k) {
            Vec values[kVecs];
            for (int j = 0; j < kVecs; ++j) {
                values[j] = load(right + j * kLanes);
            }
            for (int i = k; i < kRows; ++i) {
                const Vec factor = set1(left[i * p.left_row]);
                for (int j = 0; j < kVecs; ++j) {
                    sums[i][j] = fma(factor, values[j], sums[i][j]);
                }
            }
            left += p.left_depth;
            right += p.right_pitch;
        }
    }
    const int64_t offset = row * p.out_pitch + column;
    if (p.scale != 0.0f) {
        const Vec scale = set1(p.scale);
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kVecs; ++j) {
                sums[i][j] = fma(scale, load(p.in + offset + i * p.out_pitch + j * kLanes), sums[i][j]);
            }
        }
    }
    for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kVecs; ++j) {
            store(p.out + offset + i * p.out_pitch + j * kLanes, sums[i][j]);
        }
    }
}

template <int kVecs, bool kLower>
inline void product_columns(const Product& p, int64_t rows, int64_t column, int64_t depth) {
    int64_t row = 0;
    for (; row + kProductRows <= rows; row += kProductRows) {
        product_block<kProductRows, kVecs, kLower>(p, row, column, kLower ? row : depth);
    }
    const int64_t last_depth = kLower ? row : depth;
    switch (rows - row) {
        case 3:
            product_block<3, kVecs, kLower>(p, row, column, last_depth);
            break;
        case 2:
            product_block<2, kVecs, kLower>(p, row, column, last_depth);
            break;
        case 1:
            product_block<1, kVecs, kLower>(p, row, column, last_depth);
            break;
        default:
            break;
    }
}

template <bool kLower>
inline void product_of_kind(const Product& p, int64_t rows, int64_t columns, int64_t depth) {
    int64_t column = 0, vecs = ceil_div(columns, kLanes);
    for (; vecs >= kProductVecs; vecs -= kProductVecs) {
        product_columns<kProductVecs, kLower>(p, rows, column, depth);
        column += kProductVecs * kLanes;
    }
    if constexpr (kProductVecs == 4) {
        if (vecs == 3) {
            product_columns<3, kLower>(p, rows, column, depth);
        } else if (vecs == 2) {
            product_columns<2, kLower>(p, rows, column, depth);
        }
    }
    if (vecs == 1) {
        product_columns<1, kLower>(p, rows, column, depth);
    }
}

// columns are rounded up to whole vectors.
inline void product(const Product& p, int64_t rows, int64_t columns, int64_t depth) {
    product_of_kind<false>(p, rows, columns, depth);
}

// left is a lower triangle: row i takes depths 0 to i, and what lies above is not even multiplied by zero.
inline void product_lower(const Product& p, int64_t rows, int64_t columns) {
    product_of_kind<true>(p, rows, columns, 0);
}

// left is an upper triangle, with zeros below in the blocks on its diagonal.
inline void product_upper(const Product& p, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        Product part = p;
        part.left += row * (p.left_row + p.left_depth);
        part.right += row * p.right_pitch;
        part.in += row * p.out_pitch;
        part.out += row * p.out_pitch;
        product(part, rows - row < kLanes ? rows - row : kLanes, columns, rows - row);
    }
}

// out(row, column), row >= column: left times right, lower triangle in blocks; what lies above in a block is written too.
inline void product_to_lower(const Product& p, int64_t rows, int64_t depth) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        Product part = p;
        part.left += row * p.left_row;
        part.out += row * p.out_pitch;
        product(part, rows - row < kLanes ? rows - row : kLanes, row + kLanes < rows ? row + kLanes : rows, depth);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
