/* The C ABI: the only contract between Python (mamba_ssm/_native) and the two kernel libraries. Functions are here, codes
 * and limits in mamba_types.h, the structs that functions take in mamba_scans.h and mamba_layers.h.
 *
 * mamba_cpu and mamba_cuda export the same functions. Every tensor is a pointer with strides in elements; a stride that
 * is not listed is that of a contiguous tensor; along the length a stride may be negative. Optional pointers may be NULL. Every
 * function that returns int32_t returns MAMBA_OK or an error code, and mamba_last_error() then says what went wrong, on the
 * calling thread. Nothing here allocates device memory, synchronises, prints or throws, so all of it works under CUDA-graph
 * capture.
 *
 * Letters: B batch, D channels, L length, N dstate, G groups, H heads, P headdim, W conv width.
 * Change a struct or a function: raise MAMBA_ABI_VERSION and run scripts/generate_abi.py, which tells Python.
 */
#ifndef MAMBA_KERNELS_H
#define MAMBA_KERNELS_H

#include "mamba_layers.h"
#include "mamba_scans.h"
#include "mamba_types.h"

#if defined(_WIN32) && defined(MAMBA_BUILD_LIBRARY)
#define MAMBA_API __declspec(dllexport)
#elif defined(_WIN32)
#define MAMBA_API __declspec(dllimport)
#else
#define MAMBA_API __attribute__((visibility("default"))) /* NOLINT(msvc): the branch for other compilers */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MAMBA_ABI_VERSION 17

/* What the library is and where it runs. */
typedef struct MambaLibraryInfo {
    int32_t abi_version;
    int32_t is_cuda;              /* 0: mamba_cpu, 1: mamba_cuda */
    int32_t cuda_runtime_version; /* e.g. 13000; 0 in mamba_cpu */
    int32_t cuda_driver_version;  /* newest CUDA the installed driver supports; 0 without a driver and in mamba_cpu */
    int32_t supports_float16;
    int32_t supports_bfloat16;
    char isa[32]; /* mamba_cpu: the instruction set chosen at run time, "avx512", "avx2" or "generic"; mamba_cuda: "cuda" */
} MambaLibraryInfo;

/* A CUDA kernel, or several that run as one, as its op's table describes it (csrc/OP/kernels.h). */
typedef struct MambaKernel {
    const char* op;       /* the function that runs it, without mamba_ */
    const char* name;     /* unique among those of its op */
    const char* needs;    /* what a call must have, in words; "" for any call */
    const char* shape;    /* what a block works on, in words */
    int32_t dtypes;       /* bit 1 << MAMBA_FLOAT32, ...: there is an instance for each */
    int32_t threads;      /* of a block, at most */
    int32_t shared_bytes; /* dynamic shared memory of a block, at most */
    int32_t architecture; /* the oldest compute capability that runs it: 75, 80; 90 is 9.0a, and no other */
    int32_t enabled;
} MambaKernel;

MAMBA_API int32_t mamba_library_info(MambaLibraryInfo* info);
/* sizeof of a params struct by its name, 0 for a name that is not known: the loader compares it with its mirror. */
MAMBA_API int64_t mamba_struct_size(const char* name);
/* The calling thread's last error, in words; "" before any. Valid until the thread's next failing call. */
MAMBA_API const char* mamba_last_error(void);

/* The kernels of all ops in order of preference: a call runs the first of its op that takes it. mamba_cpu has 0. */
MAMBA_API int32_t mamba_kernel_count(void);
MAMBA_API int32_t mamba_kernel(int32_t index, MambaKernel* kernel);
/* How often this process has launched a kernel for this dtype; a launch that a CUDA graph captures counts, its replays do
 * not. -1 for an index or a dtype that does not exist. */
MAMBA_API int64_t mamba_kernel_launches(int32_t index, int32_t dtype);
/* enabled 0: calls pass over this kernel, in the whole process, until it is enabled again. One that needs nothing stays. What a
 * _workspace or _plan function says depends on it: no thread may be between such a question and its call meanwhile. */
MAMBA_API int32_t mamba_kernel_enable(int32_t index, int32_t enabled);

/* Makes the calls in their order up to the first that fails, and returns its code: a decode step is a hundred small calls, each
 * of which costs a caller in Python more than it computes. */
MAMBA_API int32_t mamba_run_sequence(const MambaSequence* params);

/* In mamba_cuda alone; mamba_cpu returns MAMBA_ERROR_UNSUPPORTED. What is launched on a stream of graph_stream between begin
 * and end does not run, but becomes a CUDA graph. Each begin has its end, also where something failed: it then gives NULL. A
 * graph launches the same on the same memory, on any stream; not by two threads at once, and UNSUPPORTED where the stream's
 * work is being recorded for another graph. What else the work depends on, such as a library's workspace, is the caller's
 * affair. */
MAMBA_API int32_t mamba_graph_stream(int32_t device, void** stream);
MAMBA_API int32_t mamba_graph_begin(int32_t device, void* stream);
MAMBA_API int32_t mamba_graph_end(int32_t device, void* stream, void** graph);
MAMBA_API int32_t mamba_graph_launch(int32_t device, void* graph, void* stream);
MAMBA_API int32_t mamba_graph_free(void* graph);

MAMBA_API int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params);
MAMBA_API int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params);
/* In mamba_cpu alone: mamba_cuda returns MAMBA_ERROR_UNSUPPORTED, and Python has it in torch operators. */
MAMBA_API int32_t mamba_selective_scan_double_backward(const MambaSelectiveScanDoubleBackward* params);
/* Fills plan from params as for the forward call, but for segments, workspace, last_state and checkpoints: alignment counts
 * too. deterministic 1: as many slots as it takes to need no atomics. */
MAMBA_API int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t deterministic,
                                            MambaSelectiveScanPlan* plan);
/* What comes first where the length (of at least one step) lies on several devices: fill the workspace, also of one segment,
 * and nothing else. For each segment its end state from zero and the product of its decays, below 0 for a restart. Backward:
 * the gradient of the state before the segment, if none came from later ones, in place of the end state. segments: the plan's
 * backward_segments, for both. The main call with `carried` goes on from there. */
MAMBA_API int32_t mamba_selective_scan_forward_carry(const MambaSelectiveScan* params);
MAMBA_API int32_t mamba_selective_scan_backward_carry(const MambaSelectiveScanBackward* params);

MAMBA_API int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params);
MAMBA_API int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params);
/* Bytes of MambaCausalConv1dBackward::workspace; reads run, dtype, the sizes, the strides of x and whether bias is NULL. */
MAMBA_API int64_t mamba_causal_conv1d_backward_workspace(const MambaCausalConv1d* params);
MAMBA_API int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params);

MAMBA_API int32_t mamba_selective_state_update(const MambaSelectiveStateUpdate* params);

MAMBA_API int32_t mamba_mamba2_step(const MambaMamba2Step* params);
MAMBA_API int32_t mamba_mamba_step(const MambaMambaStep* params);
/* Bytes of MambaMambaStep::workspace; reads run and the sizes. */
MAMBA_API int64_t mamba_mamba_step_workspace(const MambaMambaStep* params);

MAMBA_API int32_t mamba_linear(const MambaLinear* params);
MAMBA_API int32_t mamba_dequantize(const MambaDequantize* params);
MAMBA_API int32_t mamba_greedy_token(const MambaGreedyToken* params);

MAMBA_API int32_t mamba_ssd_forward(const MambaSsd* params);
MAMBA_API int32_t mamba_ssd_backward(const MambaSsdBackward* params);
/* Bytes of MambaSsd::workspace; reads all but dt and the workspace itself: ask with what the call will be given. */
MAMBA_API int64_t mamba_ssd_forward_workspace(const MambaSsd* params);
MAMBA_API int64_t mamba_ssd_backward_workspace(const MambaSsd* params);
MAMBA_API int32_t mamba_ssd_carry(const MambaSsdCarry* params);

MAMBA_API int32_t mamba_mamba3_forward(const MambaMamba3* params);
MAMBA_API int32_t mamba_mamba3_backward(const MambaMamba3Backward* params);
MAMBA_API int32_t mamba_mamba3_step(const MambaMamba3Step* params);
MAMBA_API int32_t mamba_mamba3_inputs_forward(const MambaMamba3Inputs* params);
MAMBA_API int32_t mamba_mamba3_inputs_backward(const MambaMamba3InputsBackward* params);
/* Bytes of MambaMamba3InputsBackward::workspace; reads the sizes and dtypes. */
MAMBA_API int64_t mamba_mamba3_inputs_backward_workspace(const MambaMamba3Inputs* params);
/* Bytes of MambaMamba3::workspace in each direction; they read all but the workspace itself: ask with what the call will be
   given, since the kernels depend on how its tensors are aligned. */
MAMBA_API int64_t mamba_mamba3_forward_workspace(const MambaMamba3* params);
MAMBA_API int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params);

MAMBA_API int32_t mamba_norm_forward(const MambaNorm* params);
MAMBA_API int32_t mamba_norm_backward(const MambaNormBackward* params);
/* Bytes of MambaNormBackward::workspace; reads run, the sizes, dtype, other_dtype and whether bias is NULL. */
MAMBA_API int64_t mamba_norm_backward_workspace(const MambaNorm* params);
MAMBA_API int32_t mamba_swiglu_forward(const MambaSwiglu* params);
MAMBA_API int32_t mamba_swiglu_backward(const MambaSwiglu* params);

MAMBA_API int32_t mamba_cross_entropy(const MambaCrossEntropy* params);

#ifdef __cplusplus
}
#endif

#endif /* MAMBA_KERNELS_H */
