// The norm's and SwiGLU's kernels. Each table's first row that takes a call runs it; plan.h has the predicates.
#pragma once

#include "common/kernel_table.h"
#include "norm/plan.h"

namespace mamba {

// The dtype of what lies beside x: residual and z, their sum and gradients.
enum class NormBeside {
    kSame,     // x's
    kFloat32,  // where x has 16 bits
    kEither,   // two instances, of which one runs
};

struct NormForwardKernel : KernelRow {
    bool (*takes)(const MambaNorm& p, const NormLayout& layout);
    NormBeside beside;
    bool vectors;         // of 16 bytes of x, and one tile a row
    bool gated_rms_norm;  // known at compile time
};

// clang-format off
inline constexpr NormForwardKernel kNormForwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, beside, vectors, gated_rms_norm
    {{"gated_rms_norm", "RMSNorm of x silu(z), z of x's dtype, 1 group of at most 8192, no bias; 16-byte rows",
      "a row, or as many as fill 256 threads", k16Bit, kNormGatedThreads, 0, 75},
     takes_gated_rms_norm, NormBeside::kSame, true, true},
    {{"vectors", "16-byte rows, groups of at most 16384, residual or z of x's dtype", "a row, or as many as fill 256 threads",
      kAllDtypes, kNormMaxThreads, 0, 75},
     takes_vectors, NormBeside::kSame, true, false},
    {{"vectors_float32_residual", "16-byte rows, groups of at most 16384, residual or z of float32",
      "a row, or as many as fill 256 threads", k16Bit, kNormMaxThreads, 0, 75},
     takes_vectors_float32, NormBeside::kFloat32, true, false},
    {{"elements", "", "a row in tiles of 4096, or as many as fill 256 threads", kAllDtypes, kNormMaxThreads, 0, 75},
     takes_any_norm, NormBeside::kEither, false, false},
};
// clang-format on
extern KernelTable norm_forward_table;

struct NormBackwardKernel : KernelRow {
    bool (*takes)(const MambaNormBackward& q, const NormBackwardPlan& plan);
    NormBeside beside;
    bool vectors;   // of 16 bytes of what lies beside x
    NormGate gate;  // kAny: known at run time
    bool tiles;     // a row goes through in tiles, twice
};

inline constexpr int kNormBackwardShared = 232448 - kOtherShared;

// clang-format off
inline constexpr NormBackwardKernel kNormBackwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, beside, vectors, gate, tiles
    {{"no_gate", "no z, 16-byte rows, groups of at most 8192, residual of x's dtype", "rows of a group, 512 threads",
      kAllDtypes, kNormBackwardThreads, kNormBackwardShared, 75},
     takes_no_gate, NormBeside::kSame, true, NormGate::kNone, false},
    {{"gate_before_norm", "z of x's dtype, gate before the norm, 16-byte rows, groups of at most 8192",
      "rows of a group, 512 threads", k16Bit, kNormBackwardThreads, kNormBackwardShared, 75},
     takes_gate_before_norm, NormBeside::kSame, true, NormGate::kBefore, false},
    {{"no_gate_float32_residual", "no z, 8-byte rows of x, groups of at most 8192, residual of float32",
      "rows of a group, 512 threads", k16Bit, kNormBackwardThreads, kNormBackwardShared, 75},
     takes_no_gate_float32, NormBeside::kFloat32, true, NormGate::kNone, false},
    {{"tiles", "16-byte rows, residual or z of x's dtype", "rows of a group in tiles of 8192", kAllDtypes, kNormBackwardThreads,
      kNormBackwardShared, 75},
     takes_tiles, NormBeside::kSame, true, NormGate::kAny, true},
    {{"elements", "", "rows of a group in tiles of 2048", kAllDtypes, kNormBackwardThreads, kNormBackwardShared, 75},
     takes_any_norm_backward, NormBeside::kEither, false, NormGate::kAny, true},
};
// clang-format on
extern KernelTable norm_backward_table;

struct SwigluKernel : KernelRow {
    bool (*takes)(const MambaSwiglu& p);
};

// Of both directions.
inline constexpr SwigluKernel kSwigluKernels[] = {
    {{"rows", "", "as many rows as fill 256 threads", kAllDtypes, kNormBlock, 0, 75}, takes_any_swiglu},
};
extern KernelTable swiglu_forward_table, swiglu_backward_table;

}  // namespace mamba
