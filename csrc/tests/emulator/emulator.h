// Runs CUDA kernels on the CPU: one block after another, a fiber for each of its threads. See README.md.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

namespace emulator {

// ---- launches --------------------------------------------------------------------------------------------------------

struct Launch {
    const void* kernel;  // its address
    unsigned grid[3], block[3];
    size_t shared_bytes;
};
// body: calls the kernel with its arguments, for each thread. 0, or a cudaError_t.
int run(const Launch& launch, const std::function<void()>& body);
// What cudaFuncSetAttribute lets a kernel have of dynamic shared memory, beyond 48 KiB.
void allow_shared(const void* kernel, int bytes);

// ---- what a thread does ----------------------------------------------------------------------------------------------

int lane();
// Ends the launch with an error that says what, and where.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Waits for the block's other threads, the warpgroup's or the warp's, which must all come to the same operation.
void meet_block();
void warpgroup_barrier_sync();  // the first 128 threads
void meet_warp(const char* operation);

// A lane shows a value, meets its warp, and looks at what the others have shown.
constexpr size_t kShownBytes = 32;
void* place_to_show();
const void* shown_by(int lane);
template <typename T>
void show(const T& value) {
    static_assert(sizeof(T) <= kShownBytes, "what a lane can show");
    memcpy(place_to_show(), &value, sizeof(T));
}
template <typename T>
T look(int lane) {
    T value;
    memcpy(&value, shown_by(lane), sizeof(T));
    return value;
}

template <typename T>
T shuffle(unsigned mask, T value, int source) {
    if (mask != 0xffffffffu) {
        fail("a shuffle of some lanes only (mask %#x), which the emulator does not know", mask);
    }
    show(value);
    meet_warp("a shuffle");
    return look<T>(source & 31);
}

// ---- memory ----------------------------------------------------------------------------------------------------------

unsigned char* dynamic_shared();
// Addresses of dynamic shared memory as the hardware counts them.
uint32_t shared_address(const void* pointer);
void* at_shared_address(uint32_t address);

// Copies arrive when their group is waited for. Until then their target holds NaN, and AddressSanitizer stops who touches it.
void begin_copy(void* to, const void* from, int bytes, bool valid);
void cp_async_commit_group();
void cp_async_wait_group(int pending);

// Bulk copies arrive when all threads of the block wait for something.
void mbarrier_init(uint64_t* barrier);
void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes);
void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity);
void begin_bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier);

// Bulk stores read and write when they are waited for: who touches their source before that spoils them.
void begin_bulk_store(void* to, const void* from, int bytes);
void wait_for_stores();

// ---- products of a warpgroup -----------------------------------------------------------------------------------------

// c (64 x columns, a thread's part of it) += a b, see ptx_matrix.cuh. It is computed when it is waited for, from what a and b
// then hold; until then c holds NaN.
struct Product {
    float* c;
    int columns;
    const uint32_t* a;  // registers, or NULL
    uint64_t a_tile;    // descriptors of tiles
    uint64_t b;
    bool rows_of_k;
    float (*element)(uint16_t bits);
    bool a_rows_of_k = false;
};
void wgmma(const Product& product);
void wgmma_commit_group();
void wgmma_wait_group(int pending);

}  // namespace emulator
