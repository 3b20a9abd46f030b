// linear, dequantize and greedy_token of mamba_cpu: checks, the choice of instruction set, and the split of the work over
// threads.
#include "linear/cpu.h"

#include "linear/check.h"
#include "linear/dequantize.h"

namespace mamba {
namespace {

// Products that one thread finishes in about 20 us, several times what handing work to a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;
constexpr int64_t kOutputBlock = 16;  // outputs that a share is made of: whole vectors, whole cache lines

struct ProjectionJob {
    const Projection* projection;
    const LinearKernels* kernels;
    ProjectionInput x;
    int64_t blocks, shares;
};

void run_projection_share(void* context, int64_t share) {
    const ProjectionJob& job = *static_cast<const ProjectionJob*>(context);
    const int64_t end = share_begin(job.blocks, job.shares, share + 1) * kOutputBlock;
    job.kernels->project(*job.projection, job.x, share_begin(job.blocks, job.shares, share) * kOutputBlock,
                         end < job.projection->outputs ? end : job.projection->outputs);
}

// Of a call that passed the other checks.
int32_t check_indices(const char* function, const MambaDequantize& p) {
    for (int64_t row = 0; p.indices != nullptr && row < p.rows; ++row) {
        const int64_t index = dequantized_row(p, row);
        if (!has_weight_row(p, index)) {
            return fail(MAMBA_ERROR_INDEX, "%s: indices must be in 0..%lld, got %lld", function,
                        static_cast<long long>(p.weight_rows - 1), static_cast<long long>(index));
        }
    }
    return MAMBA_OK;
}

const LinearKernels& linear_kernels_of(Isa isa) {
    return kernels_of(isa, generic::linear_kernels, avx2::linear_kernels, avx512::linear_kernels);
}

}  // namespace

bool run_projection(const MambaRun& run, Isa isa, const Projection& wanted) {
    Projection projection = wanted;
    projection.has_vnni = has_vnni(isa);
    ProjectionJob job = {};
    job.projection = &projection;
    job.kernels = &linear_kernels_of(isa);
    job.blocks = ceil_div(projection.outputs, kOutputBlock);
    job.shares = worthwhile_threads(run, projection.rows * projection.outputs * projection.features, kWorkPerThread);
    job.shares = job.shares < job.blocks ? job.shares : job.blocks;
    const Scratch scratch(input_floats(projection) + 1);
    if (scratch.get() == nullptr) {
        return false;
    }
    job.x = job.kernels->prepare(projection, scratch.get());
    run_shares(job.shares, run_projection_share, &job);
    return true;
}

}  // namespace mamba

using namespace mamba;

int32_t mamba_linear(const MambaLinear* params) {
    const char* const function = "linear";
    int32_t status = check_linear(function, params, false);
    if (status != MAMBA_OK || linear_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaLinear& p = *params;
    Projection projection = {};
    projection.weight = p.weight;
    projection.scales = p.scales;
    projection.x = p.x;
    projection.bias = p.bias;
    projection.out = p.out;
    projection.rows = p.rows;
    projection.features = p.in_features;
    projection.outputs = p.out_features;
    projection.x_stride = p.x_row_stride;
    projection.out_stride = p.out_row_stride;
    projection.x_dtype = projection.out_dtype = p.dtype;
    projection.weight_dtype = p.weight_dtype;
    projection.bias_dtype = p.bias_dtype;
    return run_projection(p.run, isa, projection)
               ? MAMBA_OK
               : fail(MAMBA_ERROR_MEMORY, "%s: no memory for %lld rows", function, static_cast<long long>(p.rows));
}

int32_t mamba_dequantize(const MambaDequantize* params) {
    const char* const function = "dequantize";
    int32_t status = check_dequantize(function, params);
    if (status != MAMBA_OK || dequantize_is_empty(*params)) {
        return status;
    }
    status = check_indices(function, *params);
    Isa isa;
    if (status == MAMBA_OK) {
        status = begin_call(function, params->run, &isa);
    }
    if (status != MAMBA_OK) {
        return status;
    }
    run_rows(linear_kernels_of(isa).dequantize, *params, params->rows, params->rows * params->features, kWorkPerThread);
    return MAMBA_OK;
}

int32_t mamba_greedy_token(const MambaGreedyToken* params) {
    const char* const function = "greedy_token";
    int32_t status = check_greedy_token(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    run_rows(linear_kernels_of(isa).greedy_token, *params, params->rows, params->rows * params->vocabulary, kWorkPerThread);
    return MAMBA_OK;
}
