// The emulated block and its threads, for the emulator's own files.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <map>
#include <vector>

namespace emulator {

enum class State { kReady, kAtWarp, kAtWarpgroup, kAtBlock, kAtRound, kDone };

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes;
    bool valid;
};

// Registers that products add to, until the last of these is waited for.
struct Accumulators {
    int products = 0;
    std::vector<float> sums;
};

struct Thread {
    unsigned number = 0;
    uint3 position = {};
    State state = State::kDone;
    const char* operation = "";  // what it meets its warp at
    void* stack_pointer = nullptr;
    // Two places by turns: a lane that goes on shows its next value while others still look at this one.
    unsigned turn = 0;
    unsigned char shown[2][kShownBytes];
    const uint64_t* barrier = nullptr;  // of the round that it waits for
    std::vector<Copy> copies;           // since the last group was ended
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Copy> stores;  // bulk stores that nobody has waited for
    std::vector<Product> products;
    std::deque<std::vector<Product>> product_groups;
    std::map<float*, Accumulators> accumulators;
};

// Of bulk copies: a barrier in shared memory.
struct Barrier {
    uint32_t rounds = 0;  // that are over
    bool expecting = false;
    int64_t expected = 0;
    int64_t begun = 0;
    std::vector<Copy> copies;
};

struct Block {
    std::vector<Thread> threads;
    unsigned char* shared = nullptr;
    std::map<const uint64_t*, Barrier> barriers;
};

Block& this_block();
Thread& this_thread();
void wait(State state, const char* operation);
unsigned draw(unsigned below);  // a random number
const char* last_failure();

// memory.cpp: lets the copies of a round arrive for which threads wait, and these go on. False if there is none that is full.
bool finish_round(Block& block);
// What is still on its way at the end of a block arrives nowhere.
void end_block(Block& block);

}  // namespace emulator
