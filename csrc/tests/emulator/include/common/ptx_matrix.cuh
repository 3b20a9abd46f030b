// The functions of csrc/common/ptx_matrix.cuh, for the emulator. What each promises stands there.
#pragma once

#include "common/dtypes.cuh"
#include "common/ptx.cuh"

namespace mamba {

template <typename T>
float element_of(uint16_t bits) {
    return DtypeTraits<T>::float_of_bits(bits);
}
template <typename T>
float element_of_pair(uint32_t pair, int i) {
    return element_of<T>(static_cast<uint16_t>(pair >> 16 * i));
}

// ---- a warp ----------------------------------------------------------------------------------------------------------

// Which row and column of each matrix of 8 x 8 a lane has as element i of its pair.
inline int row_of_pair(bool transposed, int i) {
    return transposed ? 2 * (emulator::lane() % 4) + i : emulator::lane() / 4;
}
inline int column_of_pair(bool transposed, int i) {
    return transposed ? emulator::lane() / 4 : 2 * (emulator::lane() % 4) + i;
}

inline void show_row(const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        emulator::fail("a row of a matrix at %p: it must be a multiple of 16", row);
    }
    emulator::show(row);
    emulator::meet_warp("ldmatrix or stmatrix");
}

inline void load_rows(uint32_t (&r)[4], const void* row, bool transposed) {
    show_row(row);
    for (int matrix = 0; matrix < 4; ++matrix) {
        r[matrix] = 0;
        for (int i = 0; i < 2; ++i) {
            const auto* from = emulator::look<const uint16_t*>(8 * matrix + row_of_pair(transposed, i));
            r[matrix] |= static_cast<uint32_t>(from[column_of_pair(transposed, i)]) << 16 * i;
        }
    }
    emulator::meet_warp("the end of ldmatrix");
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    load_rows(r, row, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    load_rows(r, row, true);
}

inline void store_rows(void* row, const uint32_t (&r)[4], bool transposed) {
    show_row(row);
    for (int matrix = 0; matrix < 4; ++matrix) {
        for (int i = 0; i < 2; ++i) {
            auto* to = emulator::look<uint16_t*>(8 * matrix + row_of_pair(transposed, i));
            to[column_of_pair(transposed, i)] = static_cast<uint16_t>(r[matrix] >> 16 * i);
        }
    }
    emulator::meet_warp("the end of stmatrix");
}
inline void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
    store_rows(row, r, false);
}
inline void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
    store_rows(row, r, true);
}

template <typename T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Fragments {
        uint32_t a[4], b[2];
    };
    emulator::show(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    emulator::meet_warp("mma");
    const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
    for (int pair = 0; pair < 8; ++pair) {  // of k
        const auto rows = emulator::look<Fragments>(4 * row + pair % 4);
        const Fragments columns[2] = {emulator::look<Fragments>(4 * column + pair % 4),
                                      emulator::look<Fragments>(4 * column + 4 + pair % 4)};
        for (int i = 0; i < 4; ++i) {
            const uint32_t left = rows.a[i / 2 + pair / 4 * 2], right = columns[i % 2].b[pair / 4];
            c[i] += element_of_pair<T>(left, 0) * element_of_pair<T>(right, 0) +
                    element_of_pair<T>(left, 1) * element_of_pair<T>(right, 1);
        }
    }
}

// ---- a warpgroup -----------------------------------------------------------------------------------------------------

inline void fence_registers(float (&)[4]) {}
inline void fence_registers(uint32_t (&)[4]) {}

template <typename T, int kRowsOfK, int kGroups>
void wgmma(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma({&c[0][0], 8 * kGroups, a, 0, b, kRowsOfK == 1, element_of<T>});
}
template <typename T, int kRowsOfK, int kGroups>
void wgmma(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    emulator::wgmma({&c[0][0], 8 * kGroups, nullptr, a, b, kRowsOfK == 1, element_of<T>});
}
template <typename T, int kRowsOfK, int kGroups>
void wgmma_transposed(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    emulator::wgmma({&c[0][0], 8 * kGroups, nullptr, a, b, kRowsOfK == 1, element_of<T>, true});
}
inline void wgmma_fence() {}
inline uint32_t uniform(uint32_t value) {
    return value;
}
inline void wgmma_commit_group() {
    emulator::wgmma_commit_group();
}
template <int kPending>
void wgmma_wait_group() {
    emulator::wgmma_wait_group(kPending);
}
inline void warpgroup_barrier_sync() {
    emulator::warpgroup_barrier_sync();
}
inline void fence_proxy_async() {}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

}  // namespace mamba
