// linear of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include "linear/cpu.h"

#include "linear/check.h"

namespace mamba {
namespace {

// Products that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 19;

struct ProjectionJob {
    const Projection* projection;
    const LinearKernels* kernels;
    const float* x;
    int64_t shares;
};

void run_projection_share(void* context, int64_t share) {
    const ProjectionJob& job = *static_cast<const ProjectionJob*>(context);
    const int64_t outputs = job.projection->outputs;
    job.kernels->project(*job.projection, job.x, share_begin(outputs, job.shares, share),
                         share_begin(outputs, job.shares, share + 1));
}

}  // namespace

bool run_projection(const MambaRun& run, Isa isa, const Projection& projection) {
    ProjectionJob job = {};
    job.projection = &projection;
    job.kernels = &kernels_of(isa, generic::linear_kernels, avx2::linear_kernels, avx512::linear_kernels);
    job.shares = worthwhile_threads(run, projection.rows * projection.outputs * projection.features, kWorkPerThread);
    job.shares = job.shares < projection.outputs ? job.shares : projection.outputs;
    const bool ready = projection.x_dtype == MAMBA_FLOAT32 && projection.x_stride == projection.features;
    const Scratch scratch(ready ? 1 : projection.rows * projection.features + 1);
    if (scratch.get() == nullptr) {
        return false;
    }
    if (!ready) {
        job.kernels->widen(projection, scratch.get());
    }
    job.x = ready ? static_cast<const float*>(projection.x) : scratch.get();
    run_shares(job.shares, run_projection_share, &job);
    return true;
}

}  // namespace mamba

using namespace mamba;

int32_t mamba_linear(const MambaLinear* params) {
    const char* const function = "linear";
    int32_t status = check_linear(function, params);
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
