#include "common/lock.h"

#include <mutex>

namespace mamba {
namespace {
std::mutex process;
}

ProcessLock::ProcessLock() {
    process.lock();
}

ProcessLock::~ProcessLock() {
    process.unlock();
}

}  // namespace mamba
