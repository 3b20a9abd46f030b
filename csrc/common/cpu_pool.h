// The threads of mamba_cpu.
#pragma once

#include <stdint.h>

namespace mamba {

// Runs task(context, share) for share = 0 .. shares - 1 and returns when all are done. The calling thread takes share 0, and
// then what no other thread has begun: it waits for no thread to wake up, and two callers share the threads.
void run_on_pool(int64_t shares, void (*task)(void* context, int64_t share), void* context);

}  // namespace mamba
