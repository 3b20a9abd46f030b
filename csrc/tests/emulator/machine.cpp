// The scheduler. Between two meetings a warp runs alone, in an order drawn by MAMBA_EMULATOR_SEED: work that other threads may
// see too early or too late is then seen so in some of the orders.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <mutex>
#include <random>
#include <string>

#include "machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Saves the registers that a call keeps and the stack, and goes on with the other stack where that was left.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

namespace emulator {

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kSharedBytes = 48 * 1024;  // that every kernel may have

Block block;
Thread* current = nullptr;
void* scheduler = nullptr;  // its stack, while a thread runs
const std::function<void()>* running = nullptr;
std::map<const void*, size_t> shared_limits;
std::string failure;
bool failed = false;

unsigned seed() {
    const char* text = getenv("MAMBA_EMULATOR_SEED");
    const unsigned value = text != nullptr ? static_cast<unsigned>(strtoul(text, nullptr, 10)) : std::random_device()();
    fprintf(stderr, "emulator: MAMBA_EMULATOR_SEED=%u\n", value);
    return value;
}

unsigned char* stack_of(unsigned thread) {
    static unsigned char* const stacks = static_cast<unsigned char*>(
        mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) {
        fprintf(stderr, "emulator: no memory for %u stacks\n", kMaxThreads);
        abort();
    }
    return stacks + thread * kStackBytes;
}

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
size_t scheduler_bytes = 0;
#endif

void switch_to_scheduler() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_bytes);
#endif
    emulator_switch(&current->stack_pointer, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
}

void switch_to(Thread& thread) {
    current = &thread;
    threadIdx = thread.position;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, stack_of(thread.number), kStackBytes);
#endif
    emulator_switch(&scheduler, thread.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

// Where a thread's stack begins. It never returns, and so must leave nothing of AddressSanitizer's on the stack.
__attribute__((no_sanitize_address)) void start_thread() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
    (*running)();
    current->state = State::kDone;
    switch_to_scheduler();
    abort();
}

void reset(Thread& thread, unsigned number) {
    thread.number = number;
    thread.position = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    thread.state = State::kReady;
    thread.turn = 0;
    thread.copies.clear();
    thread.copy_groups.clear();
    thread.products.clear();
    thread.product_groups.clear();
    thread.accumulators.clear();
    // As emulator_switch leaves it: six registers and the address to go on at, where a call would find its return address.
    void** top = reinterpret_cast<void**>(stack_of(number) + kStackBytes) - 1;
    *--top = reinterpret_cast<void*>(&start_thread);
    thread.stack_pointer = top - 6;
}

// Runs what is ready of a warp, its lanes from either end. Whether all have met then, and can go on.
bool run_warp(unsigned warp) {
    Thread* const threads = &block.threads[warp * 32];
    const unsigned lanes = block.threads.size() - warp * 32 < 32 ? block.threads.size() - warp * 32 : 32;
    const bool backwards = draw(2) != 0;
    for (unsigned i = 0; i < lanes && !failed; ++i) {
        Thread& thread = threads[backwards ? lanes - 1 - i : i];
        if (thread.state == State::kReady) {
            switch_to(thread);
        }
    }
    for (unsigned i = 0; i < lanes; ++i) {
        if (threads[i].state != State::kAtWarp || threads[i].operation != threads[0].operation) {
            return false;
        }
    }
    for (unsigned i = 0; i < lanes; ++i) {
        threads[i].state = State::kReady;
    }
    return !failed;
}

// Lets the first `count` threads go on if all wait at `meeting`. Those of a block may have ended.
bool release(State meeting, size_t count) {
    if (block.threads.size() < count) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        const State state = block.threads[i].state;
        if (state != meeting && (meeting != State::kAtBlock || state != State::kDone)) {
            return false;
        }
    }
    for (size_t i = 0; i < count; ++i) {
        if (block.threads[i].state == meeting) {
            block.threads[i].state = State::kReady;
        }
    }
    return true;
}
bool release_some() {
    return release(State::kAtWarpgroup, 128) || release(State::kAtBlock, block.threads.size());
}

std::string describe(const Thread& thread) {
    switch (thread.state) {
        case State::kAtWarp:
            return std::string("is at ") + thread.operation;
        case State::kAtWarpgroup:
            return "is at warpgroup_barrier_sync";
        case State::kAtBlock:
            return "is at __syncthreads";
        case State::kAtRound:
            return "waits for a round of bulk copies that are not all begun";
        default:
            return "has ended";
    }
}

// What keeps the block from going on: a thread that waits for its warp, and one that does not come, or a round that is not
// full.
void report_deadlock() {
    for (const Thread& thread : block.threads) {
        if (thread.state == State::kAtBlock || thread.state == State::kDone) {
            continue;
        }
        std::string words = "thread " + std::to_string(thread.number) + " " + describe(thread);
        const unsigned first = thread.number / 32 * 32;
        for (unsigned i = first; i < first + 32 && i < block.threads.size(); ++i) {
            const Thread& other = block.threads[i];
            if (thread.state == State::kAtWarp && (other.state != State::kAtWarp || other.operation != thread.operation)) {
                words += ", thread " + std::to_string(i) + " of its warp " + describe(other);
                break;
            }
        }
        failure = words;
        failed = true;
        return;
    }
}

void run_block() {
    std::vector<unsigned> ready;
    while (!failed) {
        ready.clear();
        bool left = false;
        for (const Thread& thread : block.threads) {
            left = left || thread.state != State::kDone;
            const unsigned warp = thread.number / 32;
            if (thread.state == State::kReady && (ready.empty() || ready.back() != warp)) {
                ready.push_back(warp);
            }
        }
        if (!left) {
            return;
        }
        if (!ready.empty()) {
            const unsigned warp = ready[draw(static_cast<unsigned>(ready.size()))];
            while (run_warp(warp) && draw(16) != 0) {  // now and then another warp overtakes
            }
        } else if (!release_some() && !finish_round(block)) {
            report_deadlock();
        }
    }
}

}  // namespace

unsigned draw(unsigned below) {
    static std::mt19937 numbers(seed());
    return numbers() % below;
}

Block& this_block() {
    return block;
}
Thread& this_thread() {
    return *current;
}
int lane() {
    return static_cast<int>(current->number % 32);
}
void* place_to_show() {
    return current->shown[++current->turn % 2];
}
const void* shown_by(int lane) {
    return block.threads[current->number / 32 * 32 + lane].shown[current->turn % 2];
}
unsigned char* dynamic_shared() {
    return block.shared;
}

void wait(State state, const char* operation) {
    current->state = state;
    current->operation = operation;
    switch_to_scheduler();
}
void meet_block() {
    wait(State::kAtBlock, "");
}
void warpgroup_barrier_sync() {
    wait(State::kAtWarpgroup, "");
}
void meet_warp(const char* operation) {
    wait(State::kAtWarp, operation);
}

void fail(const char* format, ...) {
    char words[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    failure = "thread " + std::to_string(current->number) + ": " + words;
    failed = true;
    wait(State::kDone, "");
    abort();
}

const char* last_failure() {
    return failure.c_str();
}

void allow_shared(const void* kernel, int bytes) {
    shared_limits[kernel] = static_cast<size_t>(bytes);
}

int run(const Launch& launch, const std::function<void()>& body) {
    static std::mutex machine;
    const std::lock_guard<std::mutex> alone(machine);  // Python may launch from several threads
    gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    const uint64_t blocks = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
    const uint64_t count = static_cast<uint64_t>(blockDim.x) * blockDim.y * blockDim.z;
    if (count == 0 || count > kMaxThreads || blocks == 0 || gridDim.y > 65535 || gridDim.z > 65535) {
        return cudaErrorInvalidConfiguration;
    }
    if (launch.shared_bytes > kSharedBytes && launch.shared_bytes > shared_limits[launch.kernel]) {
        return cudaErrorInvalidValue;
    }
    running = &body;
    failed = false;
    block.threads.resize(count);
    if (posix_memalign(reinterpret_cast<void**>(&block.shared), 1024, launch.shared_bytes) != 0) {
        return cudaErrorLaunchFailure;
    }
    for (uint64_t i = 0; i < blocks && !failed; ++i) {
        blockIdx = {static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                    static_cast<unsigned>(i / gridDim.x / gridDim.y)};
        memset(block.shared, 0xff, launch.shared_bytes);  // NaN
        for (unsigned thread = 0; thread < count; ++thread) {
            reset(block.threads[thread], thread);
        }
        run_block();
        end_block(block);
    }
    free(block.shared);
    if (!failed) {
        return cudaSuccess;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_of(0), kMaxThreads * kStackBytes);  // threads were left in the middle
#endif
    failure = "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) +
              "), " + failure;
    return cudaErrorLaunchFailure;
}

}  // namespace emulator
