// Tiles of rows: some steps of a matrix in memory, or a state, as rows of floats; and the memory that tiles lie in.
#pragma once

#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

template <typename T>
inline void load_rows_as(const T* data, int64_t len_stride, int64_t columns, int steps, float* tile, int64_t pitch) {
    for (int step = 0; step < steps; ++step) {
        const T* const from = data + step * len_stride;
        float* const to = tile + step * pitch;
        int64_t column = 0;
        for (; column + kLanes <= columns; column += kLanes) {
            store(to + column, load(from + column));
        }
        if (column < columns) {
            store(to + column, load_partial(from + column, static_cast<int>(columns - column)));
        }
    }
}

template <typename T>
inline void store_rows_as(T* data, int64_t len_stride, int64_t columns, int steps, const float* tile, int64_t pitch) {
    for (int step = 0; step < steps; ++step) {
        T* const to = data + step * len_stride;
        const float* const from = tile + step * pitch;
        int64_t column = 0;
        for (; column + kLanes <= columns; column += kLanes) {
            store(to + column, load(from + column));
        }
        if (column < columns) {
            store_partial(to + column, load(from + column), static_cast<int>(columns - column));
        }
    }
}

// Steps as rows of `columns` floats and zeros up to a whole vector, from memory where a row's elements are neighbours.
inline void load_rows(int32_t dtype, const void* data, int64_t offset, int64_t len_stride, int64_t columns, int steps,
                      float* tile, int64_t pitch) {
    with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        load_rows_as(static_cast<const T*>(data) + offset, len_stride, columns, steps, tile, pitch);
    });
}
inline void load_rows(int32_t dtype, const void* data, int64_t offset, int64_t len_stride, int64_t columns, int steps,
                      float* tile) {
    load_rows(dtype, data, offset, len_stride, columns, steps, tile, row_pitch(columns));
}

inline void store_rows(int32_t dtype, void* data, int64_t offset, int64_t len_stride, int64_t columns, int steps,
                       const float* tile, int64_t pitch) {
    with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        store_rows_as(static_cast<T*>(data) + offset, len_stride, columns, steps, tile, pitch);
    });
}
inline void store_rows(int32_t dtype, void* data, int64_t offset, int64_t len_stride, int64_t columns, int steps,
                       const float* tile) {
    store_rows(dtype, data, offset, len_stride, columns, steps, tile, row_pitch(columns));
}

// A matrix of floats (rows, columns) from memory with this pitch, transposed: tile[column][row], pitch of its own.
inline void load_transposed(const float* data, int64_t data_pitch, int64_t rows, int64_t columns, float* tile) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        load_tile(MAMBA_FLOAT32, data, row * data_pitch, data_pitch, 1, block_lanes(rows - row), static_cast<int>(columns),
                  tile + row, static_cast<int>(row_pitch(rows)));
    }
}

// The reverse: (rows, columns) in memory from tile[column][row].
inline void store_transposed(float* data, int64_t data_pitch, int64_t rows, int64_t columns, const float* tile) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        store_tile(MAMBA_FLOAT32, data, row * data_pitch, data_pitch, 1, block_lanes(rows - row), static_cast<int>(columns),
                   tile + row, static_cast<int>(row_pitch(rows)));
    }
}

// rows[step] = from[step] * scales[step], for steps [begin, end).
inline void scale_rows(const float* from, const float* scales, int begin, int end, int64_t columns, float* rows) {
    const int64_t pitch = row_pitch(columns);
    for (int step = begin; step < end; ++step) {
        const Vec scale = set1(scales[step]);
        for (int64_t column = 0; column < columns; column += kLanes) {
            const int64_t i = step * pitch + column;
            store(rows + i, load(from + i) * scale);
        }
    }
}

// Hands out pieces of the scratch memory, or counts them where there is none.
struct Carver {
    float* base;
    int64_t used;

    float* take(int64_t floats) {
        float* piece = base + used;
        used += row_pitch(floats);
        return piece;
    }
};

}  // namespace MAMBA_ISA
}  // namespace mamba
