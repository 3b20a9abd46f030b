// Asynchronous copies, from their beginning to their arrival.
#include "machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {

namespace {

constexpr uint32_t kFirstAddress = 1024;  // of dynamic shared memory, so that 0 is none

void forbid(const Copy& copy) {
    memset(copy.to, 0xff, static_cast<size_t>(copy.bytes));
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(copy.to, static_cast<size_t>(copy.bytes));
#endif
}

void allow(const Copy& copy) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(copy.to, static_cast<size_t>(copy.bytes));
#else
    (void)copy;
#endif
}

Copy begin(void* to, const void* from, int bytes, int alignment, bool valid) {
    const Copy copy = {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, valid};
    if ((reinterpret_cast<uintptr_t>(to) | (valid ? reinterpret_cast<uintptr_t>(from) : 0)) % alignment != 0 ||
        bytes % alignment != 0) {
        fail("a copy of %d bytes from %p to %p: each must be a multiple of %d", bytes, from, to, alignment);
    }
    if (valid) {  // here, where AddressSanitizer names the line that begins the copy
        volatile unsigned char last = copy.from[0];
        last = copy.from[bytes - 1];
        (void)last;
    }
    forbid(copy);
    return copy;
}

void arrive(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        allow(copy);
        if (copy.valid) {
            memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
        } else {
            memset(copy.to, 0, static_cast<size_t>(copy.bytes));
        }
    }
}

Barrier& known(uint64_t* barrier, const char* function) {
    const auto found = this_block().barriers.find(barrier);
    if (found == this_block().barriers.end()) {
        fail("%s before mbarrier_init", function);
    }
    return found->second;
}

}  // namespace

uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - dynamic_shared()) + kFirstAddress;
}
void* at_shared_address(uint32_t address) {
    return dynamic_shared() + address - kFirstAddress;
}

void begin_copy(void* to, const void* from, int bytes, bool valid) {
    this_thread().copies.push_back(begin(to, from, bytes, bytes, valid));
}
void cp_async_commit_group() {
    Thread& thread = this_thread();
    thread.copy_groups.push_back(thread.copies);
    thread.copies.clear();
}
void cp_async_wait_group(int pending) {
    auto& groups = this_thread().copy_groups;
    for (; groups.size() > static_cast<size_t>(pending); groups.pop_front()) {
        arrive(groups.front());
    }
}

void mbarrier_init(uint64_t* barrier) {
    this_block().barriers[barrier] = Barrier{};
}
void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
    Barrier& found = known(barrier, "mbarrier_arrive_expect_tx");
    if (found.expecting) {
        fail("mbarrier_arrive_expect_tx before anyone has waited for the barrier's round %u", found.rounds);
    }
    found.expecting = true;
    found.expected = bytes;
}
void begin_bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
    Barrier& found = known(barrier, "cp_async_bulk_load");
    found.copies.push_back(begin(to, from, bytes, 16, true));
    found.begun += bytes;
}
void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
    const Barrier& found = known(barrier, "mbarrier_wait_parity");
    this_thread().barrier = barrier;
    while (found.rounds % 2 == parity) {
        wait(State::kAtRound, "");
    }
}

void begin_bulk_store(void* to, const void* from, int bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<unsigned>(bytes)) % 16 != 0) {
        fail("a bulk store of %d bytes from %p to %p: each must be a multiple of 16", bytes, from, to);
    }
    this_thread().stores.push_back({static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, true});
}
void wait_for_stores() {
    for (const Copy& copy : this_thread().stores) {
        memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
    this_thread().stores.clear();
}

bool finish_round(Block& block) {
    std::vector<const uint64_t*> full;
    for (const Thread& thread : block.threads) {
        if (thread.state == State::kAtRound) {
            const Barrier& barrier = block.barriers[thread.barrier];
            if (barrier.expecting && barrier.begun == barrier.expected) {
                full.push_back(thread.barrier);
            }
        }
    }
    if (full.empty()) {
        return false;
    }
    const uint64_t* const chosen = full[draw(static_cast<unsigned>(full.size()))];
    Barrier& barrier = block.barriers[chosen];
    arrive(barrier.copies);
    barrier.copies.clear();
    barrier.begun = 0;
    barrier.expecting = false;
    ++barrier.rounds;
    for (Thread& thread : block.threads) {
        if (thread.state == State::kAtRound && thread.barrier == chosen) {
            thread.state = State::kReady;
        }
    }
    return true;
}

void end_block(Block& block) {
    for (Thread& thread : block.threads) {
        thread.stores.clear();
        thread.copy_groups.push_back(thread.copies);
        for (const std::vector<Copy>& group : thread.copy_groups) {
            for (const Copy& copy : group) {
                allow(copy);
            }
        }
    }
    for (const auto& named : block.barriers) {
        for (const Copy& copy : named.second.copies) {
            allow(copy);
        }
    }
    block.barriers.clear();
}

}  // namespace emulator
