// The functions of csrc/common/ptx.cuh, for the emulator. What each promises stands there.
#pragma once

#include <cuda_runtime.h>

namespace mamba {

// ---- math ------------------------------------------------------------------------------------------------------------

inline float flushed(float value) {
    return fabsf(value) < 1.17549435e-38f ? 0.0f : value;  // below the least normal number
}
inline float exp2_fast(float x) {
    return flushed(exp2f(flushed(x)));
}
inline float reciprocal_fast(float x) {
    return flushed(1.0f / flushed(x));
}
inline float sin_fast(float radians) {
    return sinf(flushed(radians));
}
inline float cos_fast(float radians) {
    return cosf(flushed(radians));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

inline void prefetch_to_L2(const void*) {}

inline void st_global_v4_b32(void* address, const uint32_t* word) {
    *static_cast<uint4*>(address) = make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T>
T* opaque(T* pointer) {
    return pointer;
}

inline int opaque(int index) {
    return index;
}

#define MAMBA_DYNAMIC_SHARED(alignment, type, name) type* const name = reinterpret_cast<type*>(emulator::dynamic_shared())

inline uint32_t shared_address(const void* pointer) {
    return emulator::shared_address(pointer);
}

inline void st_shared_b32(uint32_t address, uint32_t value) {
    *static_cast<uint32_t*>(emulator::at_shared_address(address)) = value;
}

inline void st_shared_v4_f32(void* to, float x, float y, float z, float w) {
    *static_cast<float4*>(to) = make_float4(x, y, z, w);
}

// ---- a kernel that starts early: here each ends before the next ------------------------------------------------------

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

// ---- asynchronous copies ---------------------------------------------------------------------------------------------

template <int kBytes>
void cp_async(void* to, const void* from, bool valid) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async takes them");
    emulator::begin_copy(to, from, kBytes, valid);
}
inline void cp_async_commit_group() {
    emulator::cp_async_commit_group();
}
template <int kPending>
void cp_async_wait_group() {
    emulator::cp_async_wait_group(kPending);
}

inline void mbarrier_init(uint64_t* barrier) {
    emulator::mbarrier_init(barrier);
}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
    emulator::mbarrier_arrive_expect_tx(barrier, bytes);
}
inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
    emulator::mbarrier_wait_parity(barrier, parity);
}
inline void cp_async_bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    emulator::begin_bulk_copy(to, from, bytes, barrier);
}
inline void cp_async_bulk_store(void* to, const void* from, int bytes) {
    emulator::begin_bulk_store(to, from, bytes);
}
inline void cp_async_bulk_wait_group_read() {
    emulator::wait_for_stores();
}

}  // namespace mamba
