// Threads that outlive a call: starting and joining them costs as much as a decode step's small products take.
//
// A caller puts a job on a list, which idle threads take shares from. An idle thread spins for kSpinTime, so that the calls of
// one decode step find it awake, and then sleeps. The threads are never joined and the pool is never freed: a thread may still
// run when a process ends, and Windows has killed it by then. A forked child has no threads, and makes a pool of its own.
#include "common/cpu_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>  // NOLINT(msvc): the branch for other systems
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace mamba {
namespace {

constexpr std::chrono::microseconds kSpinTime(50);

void pause_thread() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Whether the condition held before kSpinTime was over.
template <class Condition>
bool spin_until(Condition condition) {
    const std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 16; ++i) {
            if (condition()) {
                return true;
            }
            pause_thread();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// What condition.wait(lock, ready) is. gcc 12 gives that function a symbol which wheels for glibc 2.28 may not need; to wait
// until a time has none.
template <class Ready>
void wait_for(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Ready ready) {
    while (!ready()) {
        condition.wait_until(lock, std::chrono::system_clock::now() + std::chrono::hours(1));
    }
}

// Held for a few instructions at a time. A holder that the system has put aside is waited for without using its processor.
class SpinLock {
 public:
    void lock() {
        for (int tries = 0; held_.test_and_set(std::memory_order_acquire); ++tries) {
            if (tries < 64) {
                pause_thread();
            } else {
                std::this_thread::yield();
            }
        }
    }
    void unlock() { held_.clear(std::memory_order_release); }

 private:
    std::atomic_flag held_ = ATOMIC_FLAG_INIT;
};

// On its caller's stack. The caller leaves when nothing is unfinished, and no thread looks at it after finishing its last
// share.
struct Job {
    void (*task)(void*, int64_t);
    void* context;
    int64_t shares;
    int64_t begun;  // under the list's lock, as is `following`
    Job* following;
    std::atomic<int64_t> unfinished;
};

class Pool {
 public:
    void run(Job& job) {
        add(job);
        finish(job, 0);
        for (int64_t share = claim(job); share >= 0; share = claim(job)) {
            finish(job, share);
        }
        const auto done = [&job] { return job.unfinished.load() == 0; };
        if (spin_until(done)) {
            return;
        }
        ++callers_asleep_;
        std::unique_lock<std::mutex> lock(mutex_);
        wait_for(job_done_, lock, done);
        --callers_asleep_;
    }

 private:
    SpinLock list_lock_;
    Job* first_ = nullptr;          // of the jobs with shares that nobody has begun
    std::atomic<int64_t> open_{0};  // such shares, of all jobs
    std::atomic<int> idle_{0}, threads_{0};
    // More threads than processors would only take turns.
    const int most_threads_ = static_cast<int>(std::thread::hardware_concurrency()) - 1;

    std::mutex mutex_;  // for sleeping; what is waited for are the atomics above
    std::condition_variable job_added_, job_done_;
    std::atomic<int> threads_asleep_{0}, callers_asleep_{0};

    void add(Job& job) {
        job.begun = 1;
        job.unfinished = job.shares;
        list_lock_.lock();
        job.following = first_;
        first_ = &job;
        const int64_t open = open_ += job.shares - 1;
        list_lock_.unlock();
        for (int64_t missing = open - idle_; missing > 0 && start_thread(); --missing) {
        }
        if (threads_asleep_ > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (int64_t share = 1; share < job.shares && share <= threads_asleep_; ++share) {
                job_added_.notify_one();
            }
        }
    }

    // A share of this job that nobody has begun, or -1. Whoever takes the last one takes the job off the list.
    int64_t claim_locked(Job& job) {
        if (job.begun == job.shares) {
            return -1;
        }
        const int64_t share = job.begun++;
        --open_;
        if (job.begun == job.shares) {
            Job** place = &first_;
            while (*place != &job) {
                place = &(*place)->following;
            }
            *place = job.following;
        }
        return share;
    }

    int64_t claim(Job& job) {
        list_lock_.lock();
        const int64_t share = claim_locked(job);
        list_lock_.unlock();
        return share;
    }

    Job* claim_any(int64_t* share) {
        list_lock_.lock();
        Job* const job = first_;
        if (job != nullptr) {
            *share = claim_locked(*job);
        }
        list_lock_.unlock();
        return job;
    }

    void finish(Job& job, int64_t share) {
        job.task(job.context, share);
        if (--job.unfinished == 0 && callers_asleep_ > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            job_done_.notify_all();
        }
    }

    // A type of our own rather than a lambda or std::thread's variadic call keeps the instantiation out of the exports.
    struct Worker {
        Pool* pool;
        void operator()() const { pool->work(); }
    };

    bool start_thread() {
        int threads = threads_;
        do {
            if (threads >= most_threads_) {
                return false;
            }
        } while (!threads_.compare_exchange_weak(threads, threads + 1));
        ++idle_;
        try {
            std::thread(Worker{this}).detach();
            return true;
        } catch (...) {  // no more threads to be had: callers do the work
            --idle_;
            --threads_;
            return false;
        }
    }

    void work() {
        const auto some_open = [this] { return open_.load() > 0; };
        for (;;) {
            if (!spin_until(some_open)) {
                ++threads_asleep_;
                std::unique_lock<std::mutex> lock(mutex_);
                wait_for(job_added_, lock, some_open);
                --threads_asleep_;
            }
            int64_t share = 0;
            Job* const job = claim_any(&share);
            if (job != nullptr) {
                --idle_;
                finish(*job, share);
                ++idle_;
            }
        }
    }
};

std::atomic<Pool*> the_pool{nullptr};

#if !defined(_WIN32)
[[maybe_unused]] const int kForkHandler = pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; });
#endif

Pool* make_pool() {
    Pool* made = new (std::nothrow) Pool;
    Pool* known = nullptr;
    if (made != nullptr && !the_pool.compare_exchange_strong(known, made)) {
        delete made;  // another thread was first
        made = known;
    }
    return made;
}

}  // namespace

void run_on_pool(int64_t shares, void (*task)(void* context, int64_t share), void* context) {
    Pool* pool = shares > 1 ? the_pool.load() : nullptr;
    pool = pool == nullptr && shares > 1 ? make_pool() : pool;
    if (pool == nullptr) {
        for (int64_t share = 0; share < shares; ++share) {
            task(context, share);
        }
        return;
    }
    Job job;
    job.task = task;
    job.context = context;
    job.shares = shares;
    pool->run(job);
}

}  // namespace mamba
