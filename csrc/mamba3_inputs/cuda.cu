// The C ABI of what Mamba-3's scan takes in mamba_cuda.
#include "common/cuda_device.h"
#include "common/cuda_sums.h"
#include "mamba3_inputs/check.h"
#include "mamba3_inputs/kernels.h"
#include "mamba3_inputs/launch.h"

namespace mamba {
KernelTable mamba3_inputs_forward_table("mamba3_inputs_forward", kMamba3InputsForwardKernels);
KernelTable mamba3_inputs_backward_table("mamba3_inputs_backward", kMamba3InputsBackwardKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba3_inputs_forward(const MambaMamba3Inputs* params) {
    const char* const function = "mamba3_inputs_forward";
    const int32_t status = check_mamba3_inputs_forward(function, params);
    if (status != MAMBA_OK || mamba3_inputs_are_empty(*params)) {
        return status;
    }
    const MambaMamba3Inputs& p = *params;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(mamba3_inputs_forward_table, kMamba3InputsForwardKernels, device.major, p.dtype, p);
        error = launchers_of<Mamba3InputsLaunchers>(p.dtype).forward(p, kernel);
    }
    return cuda_status(error, function, p.rows, p.nheads, p.matrices, p.dstate);
}

int64_t mamba_mamba3_inputs_backward_workspace(const MambaMamba3Inputs* params) {
    if (check_mamba3_inputs_problem("mamba3_inputs_backward_workspace", params) != MAMBA_OK ||
        mamba3_inputs_are_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    return Mamba3InputsWorkspace(*params).floats * static_cast<int64_t>(sizeof(float));
}

int32_t mamba_mamba3_inputs_backward(const MambaMamba3InputsBackward* params) {
    const char* const function = "mamba3_inputs_backward";
    const int32_t status = check_mamba3_inputs_backward(function, params);
    if (status != MAMBA_OK || mamba3_inputs_are_empty(params->forward)) {
        return status;
    }
    const MambaMamba3InputsBackward& q = *params;
    const MambaMamba3Inputs& p = q.forward;
    const CallDevice device(p.run.device);
    const Mamba3InputsWorkspace workspace(p);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(mamba3_inputs_backward_table, kMamba3InputsBackwardKernels, device.major, p.dtype, p);
        error = launchers_of<Mamba3InputsLaunchers>(p.dtype).backward(q, workspace, kernel);
    }
    if (error == cudaSuccess) {
        const float* const parts = static_cast<const float*>(q.workspace);
        PartSums sums = {};
        sums.add(part_sum(parts + workspace.q_weight, workspace.blocks, q.dq_weight, p.q_weight_dtype, p.dstate));
        sums.add(part_sum(parts + workspace.k_weight, workspace.blocks, q.dk_weight, p.k_weight_dtype, p.dstate));
        sums.add(part_sum(parts + workspace.dt_bias, workspace.blocks, q.ddt_bias, MAMBA_FLOAT32, p.nheads));
        error = launch_part_sums(sums, p.run.stream);
    }
    return cuda_status(error, function, p.rows, p.nheads, p.matrices, p.dstate);
}
