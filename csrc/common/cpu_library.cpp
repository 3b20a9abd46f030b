// What mamba_cpu says about itself, the choice of instruction set, and the threads of a call.
#include <stdlib.h>
#include <string.h>

#include <new>

#include "common/cpu_pool.h"
#include "common/cpu_runtime.h"

#if defined(__x86_64__) || defined(_M_X64)
#define MAMBA_X86 1
#include <xmmintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace mamba {

// ---- instruction set -------------------------------------------------------------------------------------------------

static const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return "avx512";
        case Isa::avx2:
            return "avx2";
        default:
            return "generic";
    }
}

#ifdef MAMBA_X86
struct CpuidRegisters {
    uint32_t eax, ebx, ecx, edx;
};

static CpuidRegisters cpuid(uint32_t leaf) {
    CpuidRegisters r = {0, 0, 0, 0};
#if defined(_MSC_VER)
    int values[4];
    __cpuidex(values, static_cast<int>(leaf), 0);
    r = {static_cast<uint32_t>(values[0]), static_cast<uint32_t>(values[1]), static_cast<uint32_t>(values[2]),
         static_cast<uint32_t>(values[3])};
#else
    __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
    return r;
}

// The register sets that the operating system saves on a task switch; without that a CPU's AVX is of no use.
static uint32_t saved_registers() {
#if defined(_MSC_VER)
    return static_cast<uint32_t>(_xgetbv(0));
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // NOLINT(msvc): the branch for other compilers
    return low;
#endif
}
#endif

static Isa detect_isa() {
#ifdef MAMBA_X86
    const uint32_t leaves = cpuid(0).eax;
    if (leaves < 7) {
        return Isa::generic;
    }
    const uint32_t features = cpuid(1).ecx;
    const uint32_t fma_osxsave_avx_f16c = (1u << 12) | (1u << 27) | (1u << 28) | (1u << 29);
    if ((features & fma_osxsave_avx_f16c) != fma_osxsave_avx_f16c) {
        return Isa::generic;
    }
    const uint32_t saved = saved_registers();
    const uint32_t extended = cpuid(7).ebx;
    const uint32_t xmm_ymm = 0x6, opmask_zmm = 0xe0, avx2 = 1u << 5;
    if ((saved & xmm_ymm) != xmm_ymm || (extended & avx2) == 0) {
        return Isa::generic;
    }
    const uint32_t avx512_f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    if ((saved & opmask_zmm) == opmask_zmm && (extended & avx512_f_dq_bw_vl) == avx512_f_dq_bw_vl) {
        return Isa::avx512;
    }
    return Isa::avx2;
#else
    return Isa::generic;
#endif
}

bool has_vnni(Isa isa) {
#ifdef MAMBA_X86
    static const bool found = (cpuid(7).ecx & (1u << 11)) != 0;
    return isa == Isa::avx512 && found;
#else
    (void)isa;
    return false;
#endif
}

struct IsaChoice {
    Isa isa;
    bool known, available;
    char wanted[32];
};

static IsaChoice make_choice() {
    IsaChoice choice = {detect_isa(), true, true, ""};
    const char* wanted = getenv("MAMBA_SSM_CPU_ISA");
    if (wanted == nullptr || wanted[0] == '\0') {
        return choice;
    }
    strncpy(choice.wanted, wanted, sizeof(choice.wanted) - 1);
    const Isa all[] = {Isa::generic, Isa::avx2, Isa::avx512};
    for (const Isa isa : all) {
        if (strcmp(wanted, isa_name(isa)) == 0) {
            choice.available = isa <= choice.isa;
            choice.isa = choice.available ? isa : choice.isa;
            return choice;
        }
    }
    choice.known = false;
    return choice;
}

int32_t choose_isa(Isa* isa) {
    static const IsaChoice choice = make_choice();
    if (!choice.known) {
        return fail(MAMBA_ERROR_INVALID, "MAMBA_SSM_CPU_ISA: expected generic, avx2 or avx512, got \"%s\"", choice.wanted);
    }
    if (!choice.available) {
        return fail(MAMBA_ERROR_INVALID, "MAMBA_SSM_CPU_ISA=%s: this CPU has no more than %s", choice.wanted,
                    isa_name(choice.isa));
    }
    *isa = choice.isa;
    return MAMBA_OK;
}

int32_t begin_call(const char* function, const MambaRun& run, Isa* isa) {
    Check check(function);
    check.at_least(1, "run.num_threads", run.num_threads);
    return check.ok() ? choose_isa(isa) : check.status();
}

// ---- threads ---------------------------------------------------------------------------------------------------------

int64_t worthwhile_threads(const MambaRun& run, int64_t work, int64_t work_per_thread) {
    const int64_t useful = work / work_per_thread;
    const int64_t most = run.num_threads;
    return useful < 1 ? 1 : useful < most ? useful : most;
}

int64_t share_begin(int64_t total, int64_t shares, int64_t share) {
    const int64_t rest = total % shares;
    return total / shares * share + (share < rest ? share : rest);
}

namespace {
struct Task {
    void (*run)(void*, int64_t);
    void* context;
};

void run_share(void* context, int64_t share) {
    const Task& task = *static_cast<const Task*>(context);
#ifdef MAMBA_X86
    const unsigned int flush_to_zero_and_denormals_are_zero = 0x8040;
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode | flush_to_zero_and_denormals_are_zero);
    task.run(task.context, share);
    _mm_setcsr(mode);
#else
    task.run(task.context, share);
#endif
}
}  // namespace

void run_shares(int64_t shares, void (*task)(void* context, int64_t share), void* context) {
    Task wrapped = {task, context};
    run_on_pool(shares, run_share, &wrapped);
}

Scratch::Scratch(int64_t floats)
    : data_(
          static_cast<float*>(operator new(static_cast<size_t>(floats) * sizeof(float), std::align_val_t(64), std::nothrow))) {}

Scratch::~Scratch() {
    operator delete(data_, std::align_val_t(64));
}

}  // namespace mamba

int32_t mamba_library_info(MambaLibraryInfo* info) {
    mamba::Check check("library_info");
    check.pointer("info", info);
    if (!check.ok()) {
        return check.status();
    }
    memset(info, 0, sizeof(*info));
    info->abi_version = MAMBA_ABI_VERSION;
    info->supports_float16 = mamba::dtype_enabled(MAMBA_FLOAT16);
    info->supports_bfloat16 = mamba::dtype_enabled(MAMBA_BFLOAT16);
    mamba::Isa isa;
    const int32_t status = mamba::choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    strncpy(info->isa, mamba::isa_name(isa), sizeof(info->isa) - 1);
    return MAMBA_OK;
}

static int32_t no_graphs(const char* function) {
    return mamba::fail(MAMBA_ERROR_UNSUPPORTED, "%s: there are graphs in mamba_cuda alone", function);
}

int32_t mamba_graph_stream(int32_t, void**) {
    return no_graphs("graph_stream");
}

int32_t mamba_graph_begin(int32_t, void*) {
    return no_graphs("graph_begin");
}

int32_t mamba_graph_end(int32_t, void*, void**) {
    return no_graphs("graph_end");
}

int32_t mamba_graph_launch(int32_t, void*, void*) {
    return no_graphs("graph_launch");
}

int32_t mamba_graph_free(void*) {
    return no_graphs("graph_free");
}
