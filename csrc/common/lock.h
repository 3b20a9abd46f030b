// A lock of the whole process, for CUDA sources, which do not include the standard library's.
#pragma once

namespace mamba {

// Held as long as it lives.
class ProcessLock {
 public:
    ProcessLock();
    ~ProcessLock();
    ProcessLock(const ProcessLock&) = delete;
    ProcessLock& operator=(const ProcessLock&) = delete;
};

}  // namespace mamba
