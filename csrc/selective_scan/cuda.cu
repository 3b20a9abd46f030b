// The scan's C ABI in mamba_cuda.
#include "common/cuda_sums.h"
#include "selective_scan/check.h"
#include "selective_scan/launch.h"
#include "selective_scan/plan.h"

namespace mamba {

KernelTable scan_forward_table("selective_scan_forward", kScanForwardKernels);
KernelTable scan_backward_table("selective_scan_backward", kScanBackwardKernels);

namespace {

cudaError_t zero_matrices(const ScanBackward& q) {
    const MambaSelectiveScan& p = q.forward;
    const int64_t floats = p.batch * p.ngroups * p.dstate * p.seqlen;
    const cudaStream_t stream = static_cast<cudaStream_t>(p.run.stream);
    const auto zero = [&](float* from, int64_t count) {
        return cudaMemsetAsync(from, 0, static_cast<size_t>(count) * sizeof(float), stream);
    };
    if (p.variable_B && p.variable_C && q.parts.dB != q.dB) {  // both in the workspace, dC behind dB
        return zero(q.parts.dB, q.parts.dC - q.parts.dB + floats);
    }
    const cudaError_t error = p.variable_B ? zero(q.parts.dB, floats) : cudaSuccess;
    return error == cudaSuccess && p.variable_C ? zero(q.parts.dC, floats) : error;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params) {
    const char* const function = "selective_scan_forward";
    const int32_t status = check_scan_forward(function, params);
    if (status != MAMBA_OK || scan_is_empty(*params)) {
        return status;
    }
    const MambaSelectiveScan& p = *params;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const bool aligned = inputs_aligned(p);
        error = launchers_of<ScanForwardLaunchers>(p.dtype).forward(p, aligned, forward_kernel(p, aligned, device));
    }
    return cuda_status(error, function, p.batch, p.dim, p.seqlen, p.dstate);
}

int32_t mamba_selective_scan_forward_carry(const MambaSelectiveScan* params) {
    const char* const function = "selective_scan_forward_carry";
    const int32_t status = check_scan_forward_carry(function, params);
    if (status != MAMBA_OK || scan_is_empty(*params)) {
        return status;
    }
    const MambaSelectiveScan& p = *params;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const bool aligned = inputs_aligned(p);
        error = launchers_of<ScanForwardLaunchers>(p.dtype).carry(p, aligned, forward_carry_kernel(p, aligned, device));
    }
    return cuda_status(error, function, p.batch, p.dim, p.seqlen, p.dstate);
}

int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t deterministic, MambaSelectiveScanPlan* plan) {
    const char* const function = "selective_scan_plan";
    const int32_t status = check_scan_plan(function, params, plan);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaSelectiveScan& p = *params;
    const DeviceLimits device(p.run.device);
    if (device.error == cudaSuccess) {
        *plan = make_scan_plan(p, device, deterministic != 0);
    }
    return cuda_status(device.error, function, p.batch, p.dim, p.seqlen, p.dstate);
}

int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params) {
    const char* const function = "selective_scan_backward";
    const int32_t status = check_scan_backward(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    const ScanBackward q = scan_backward(*params);
    const MambaSelectiveScan& p = q.forward;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const bool aligned = inputs_aligned(p) && gradients_aligned(q);
        const int kernel = backward_kernel(p, aligned, device);
        const int64_t slots = backward_slots(p, kernel);
        if (q.slots != 1 && q.slots != slots) {
            return fail(MAMBA_ERROR_INVALID, "%s: slots must be 1 or %lld, as mamba_selective_scan_plan says, got %lld",
                        function, static_cast<long long>(slots), static_cast<long long>(q.slots));
        }
        error = q.slots < slots ? zero_matrices(q) : cudaSuccess;  // atomics add to them
        const auto launch = launchers_of<ScanBackwardLaunchers>(p.dtype).backward;
        error = error != cudaSuccess ? error : launch(q, aligned, kernel);
        error = error != cudaSuccess ? error : launch_part_sums(scan_part_sums(q), p.run.stream);
    }
    return cuda_status(error, function, p.batch, p.dim, p.seqlen, p.dstate);
}

int32_t mamba_selective_scan_double_backward(const MambaSelectiveScanDoubleBackward* params) {
    const char* const function = "selective_scan_double_backward";
    const int32_t status = check_scan_double_backward(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    return fail(MAMBA_ERROR_UNSUPPORTED, "%s: mamba_cuda has no kernel for it, mamba_cpu has", function);
}

int32_t mamba_selective_scan_backward_carry(const MambaSelectiveScanBackward* params) {
    const char* const function = "selective_scan_backward_carry";
    const int32_t status = check_scan_backward_carry(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    const ScanBackward q = scan_backward(*params);
    const MambaSelectiveScan& p = q.forward;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const bool aligned = inputs_aligned(p) && gradients_aligned(q);
        const auto launch = launchers_of<ScanBackwardLaunchers>(p.dtype).carry;
        error = launch(q, aligned, backward_kernel(p, aligned, device));
    }
    return cuda_status(error, function, p.batch, p.dim, p.seqlen, p.dstate);
}
