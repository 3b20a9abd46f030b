// The functions of csrc/common/ptx_rows.cuh, for the emulator. What each promises stands there.
#pragma once

#include "common/ptx.cuh"

namespace mamba {

inline const char* row_at(const char* rows, int index, int stride) {
    return rows + static_cast<int64_t>(index) * stride;
}
inline void st_shared_v2_b32(uint32_t address, uint2 value) {
    *static_cast<uint2*>(emulator::at_shared_address(address)) = value;
}
inline uint2 ld_shared_v2_b32(uint32_t address) {
    return *static_cast<const uint2*>(emulator::at_shared_address(address));
}
template <int kBytes>
inline void cp_async_shared(uint32_t to, const void* from) {
    emulator::begin_copy(emulator::at_shared_address(to), from, kBytes, true);
}
inline void cp_async_4(void* to, const void* from) {
    emulator::begin_copy(to, from, 4, true);
}

}  // namespace mamba
