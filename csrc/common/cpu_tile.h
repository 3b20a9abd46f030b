// Tiles: kLanes channels side by side, one row of floats a time step, whatever the dtype and layout in memory.
#pragma once

#include "common/cpu_vector.h"
#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {
namespace MAMBA_ISA {

// Channels of the block that begins where `left` channels are left.
inline int block_lanes(int64_t left) {
    return left < kLanes ? static_cast<int>(left) : kLanes;
}

// visit(Type<T>()) for the T that a dtype stores. Checks have refused a dtype that this build does not have.
template <typename T>
struct Type {
    using type = T;
};
template <class Visit>
MAMBA_INLINE void with_type(int32_t dtype, const Visit& visit) {
    if (dtype == MAMBA_FLOAT32) {
        visit(Type<float>());
    }
#ifndef MAMBA_DISABLE_HALF
    if (dtype == MAMBA_FLOAT16) {
        visit(Type<Half>());
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (dtype == MAMBA_BFLOAT16) {
        visit(Type<Bfloat16>());
    }
#endif
}

inline void fill_zero(float* data, int64_t floats) {
    memset(data, 0, static_cast<size_t>(floats) * sizeof(float));
}

// Where a tile lies in memory: element (lane, step) at data + lane * lane_stride + step * step_stride.
template <typename T>
struct TileIn {
    const T* data;
    int64_t lane_stride, step_stride;
};
template <typename T>
struct TileOut {
    T* data;
    int64_t lane_stride, step_stride;
};

template <typename T>
inline void load_tile_as(TileIn<T> from, int lanes, int steps, float* tile, int pitch) {
    if (from.lane_stride == 1) {
        for (int step = 0; step < steps; ++step) {
            const T* row = from.data + step * from.step_stride;
            store(tile + step * pitch, lanes == kLanes ? load(row) : load_partial(row, lanes));
        }
        return;
    }
    if ((from.step_stride == 1 || from.step_stride == -1) && steps > 1) {
        const bool back = from.step_stride < 0;
        for (int first = 0; first < steps; first += kLanes) {
            const int count = steps - first < kLanes ? steps - first : kLanes;
            const int lowest = back ? 1 - first - count : first;  // the place of the step at the lowest address
            Vec rows[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                const T* row = from.data + (lane < lanes ? lane : 0) * from.lane_stride + lowest;
                rows[lane] = lane >= lanes ? zero() : count == kLanes ? load(row) : load_partial(row, count);
            }
            transpose(rows);
            for (int i = 0; i < kLanes; ++i) {
                if (i < count) {
                    store(tile + (back ? first + count - 1 - i : first + i) * pitch, rows[i]);
                }
            }
        }
        return;
    }
    for (int step = 0; step < steps; ++step) {
        T row[kLanes] = {};
        for (int lane = 0; lane < lanes; ++lane) {
            row[lane] = from.data[lane * from.lane_stride + step * from.step_stride];
        }
        store(tile + step * pitch, load(row));
    }
}

template <typename T>
inline void store_tile_as(TileOut<T> to, int lanes, int steps, const float* tile, int pitch) {
    if (to.lane_stride == 1) {
        for (int step = 0; step < steps; ++step) {
            T* row = to.data + step * to.step_stride;
            const Vec value = load(tile + step * pitch);
            if (lanes == kLanes) {
                store(row, value);
            } else {
                store_partial(row, value, lanes);
            }
        }
        return;
    }
    if ((to.step_stride == 1 || to.step_stride == -1) && steps > 1) {
        const bool back = to.step_stride < 0;
        for (int first = 0; first < steps; first += kLanes) {
            const int count = steps - first < kLanes ? steps - first : kLanes;
            const int lowest = back ? 1 - first - count : first;
            Vec rows[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                rows[i] = i < count ? load(tile + (back ? first + count - 1 - i : first + i) * pitch) : zero();
            }
            transpose(rows);
            for (int lane = 0; lane < kLanes; ++lane) {
                if (lane < lanes) {
                    T* row = to.data + lane * to.lane_stride + lowest;
                    if (count == kLanes) {
                        store(row, rows[lane]);
                    } else {
                        store_partial(row, rows[lane], count);
                    }
                }
            }
        }
        return;
    }
    for (int step = 0; step < steps; ++step) {
        T row[kLanes];
        store(row, load(tile + step * pitch));
        for (int lane = 0; lane < lanes; ++lane) {
            to.data[lane * to.lane_stride + step * to.step_stride] = row[lane];
        }
    }
}

// tile[step * pitch + lane] for step < steps; lanes from `lanes` on are zero. offset is in elements.
inline void load_tile(int32_t dtype, const void* data, int64_t offset, int64_t lane_stride, int64_t step_stride, int lanes,
                      int steps, float* tile, int pitch = kLanes) {
    with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        load_tile_as<T>({static_cast<const T*>(data) + offset, lane_stride, step_stride}, lanes, steps, tile, pitch);
    });
}

// The reverse of load_tile: rounds to nearest even and leaves lanes from `lanes` on alone.
inline void store_tile(int32_t dtype, void* data, int64_t offset, int64_t lane_stride, int64_t step_stride, int lanes,
                       int steps, const float* tile, int pitch = kLanes) {
    with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        store_tile_as<T>({static_cast<T*>(data) + offset, lane_stride, step_stride}, lanes, steps, tile, pitch);
    });
}

// One row of a tile, as a vector: element lane at data + offset + lane * stride; zero from `lanes` on.
inline Vec load_lanes(int32_t dtype, const void* data, int64_t offset, int64_t stride, int lanes) {
    if (stride == 1 && lanes == kLanes) {
        Vec row = zero();
        with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
            using T = typename decltype(type)::type;
            row = load(static_cast<const T*>(data) + offset);
        });
        return row;
    }
    float row[kLanes] = {};
    if (stride == 0 && lanes == kLanes) {
        load_tile(dtype, data, offset, 1, 0, 1, 1, row);
        return set1(row[0]);
    }
    load_tile(dtype, data, offset, stride, 0, lanes, 1, row);
    return load(row);
}

inline void store_lanes(int32_t dtype, void* data, int64_t offset, int64_t stride, int lanes, Vec value) {
    if (stride == 1 && lanes == kLanes) {
        with_type(dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
            using T = typename decltype(type)::type;
            store(static_cast<T*>(data) + offset, value);
        });
        return;
    }
    float row[kLanes];
    store(row, value);
    store_tile(dtype, data, offset, stride, 0, lanes, 1, row);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
