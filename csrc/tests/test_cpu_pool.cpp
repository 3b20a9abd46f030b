// The threads of mamba_cpu, through linear: callers side by side, forked children, and a process that ends while it works.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/testing.h"

#if !defined(_WIN32)
#include <sys/wait.h>  // NOLINT(msvc): the branch for other systems
#include <unistd.h>    // NOLINT(msvc): the same
#endif

using testing::begin_case;
using testing::expect;
using testing::expect_ok;

namespace {

constexpr int64_t kRows = 2, kFeatures = 256, kOutputs = 4096;  // enough work for several threads

struct Problem {
    std::vector<float> x, weight, expected;

    Problem() : x(kRows * kFeatures), weight(kFeatures * kOutputs), expected(kRows * kOutputs) {
        for (size_t i = 0; i < x.size(); ++i) {
            x[i] = static_cast<float>(i % 7) - 3.0f;
        }
        for (size_t i = 0; i < weight.size(); ++i) {
            weight[i] = static_cast<float>(i % 11) - 5.0f;
        }
        run(1, expected.data());
    }

    int32_t run(int32_t threads, float* out) const {
        MambaLinear p;
        memset(&p, 0, sizeof(p));
        p.run.num_threads = threads;
        p.rows = kRows;
        p.in_features = p.x_row_stride = kFeatures;
        p.out_features = p.out_row_stride = kOutputs;
        p.x = x.data();
        p.weight = weight.data();
        p.out = out;
        return mamba_linear(&p);
    }

    bool right(int32_t threads) const {
        std::vector<float> out(expected.size(), -1.0f);
        return run(threads, out.data()) == MAMBA_OK && out == expected;
    }
};

// The same sums whatever the number of threads, which changes from call to call.
void test_numbers_of_threads(const Problem& problem) {
    for (const int32_t threads : {1, 2, 3, 16, 200, 2, 1}) {
        begin_case("pool: %d threads", static_cast<int>(threads));
        expect(problem.right(threads), "the same sums");
    }
}

void test_callers(const Problem& problem) {
    begin_case("pool: 16 callers");
    std::atomic<int> wrong(0);
    std::vector<std::thread> callers;
    for (int32_t caller = 0; caller < 16; ++caller) {
        callers.emplace_back([&problem, &wrong, caller] {
            for (int32_t turn = 0; turn < 20; ++turn) {
                wrong += !problem.right(1 + (caller + turn) % 5);
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    expect(wrong == 0, "the same sums");
}

// Threads that found nothing to do are asleep.
void test_after_a_pause(const Problem& problem) {
    begin_case("pool: after a pause");
    for (int turn = 0; turn < 5; ++turn) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        expect(problem.right(4), "the same sums");
    }
}

// ThreadSanitizer follows no threads of a child that was forked from several.
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
void expect_good_child(pid_t child) {
    int status = -1;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child's exit status");
}

// Children of a process whose threads are at work, and children of those.
void test_fork(const Problem& problem) {
    begin_case("pool: forked children");
    std::atomic<bool> stop(false);
    std::thread other([&] {
        while (!stop) {
            problem.right(3);
        }
    });
    for (int turn = 0; turn < 8; ++turn) {
        const pid_t child = fork();
        if (child == 0) {
            bool good = problem.right(4);
            const pid_t grandchild = fork();
            if (grandchild == 0) {
                _exit(problem.right(4) ? 0 : 1);
            }
            int status = -1;
            good = waitpid(grandchild, &status, 0) == grandchild && status == 0 && good;
            _exit(good ? 0 : 1);
        }
        expect_good_child(child);
    }
    stop = true;
    other.join();
}

void test_exit_at_work(const Problem& problem) {
    begin_case("pool: exit while it works");
    for (int turn = 0; turn < 5; ++turn) {
        const pid_t child = fork();
        if (child == 0) {
            std::thread([&problem] {
                for (;;) {
                    problem.right(4);
                }
            }).detach();
            problem.right(4);
            exit(0);
        }
        expect_good_child(child);
    }
}
#endif

}  // namespace

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        static const Problem& problem = *new Problem;  // outlives the threads of test_exit_at_work
        test_numbers_of_threads(problem);
        test_callers(problem);
        test_after_a_pause(problem);
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
        test_fork(problem);
        test_exit_at_work(problem);
#endif
    });
}
