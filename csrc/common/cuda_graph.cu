// CUDA graphs of what a caller launches on a stream: the second time it launches the same, that is one call.
#include "common/check.h"
#include "common/cuda_device.h"

using namespace mamba;

static int32_t graph_status(cudaError_t error, const char* function) {
    if (error == cudaSuccess) {
        return MAMBA_OK;
    }
    cudaGetLastError();  // sticky until it is read
    return fail(MAMBA_ERROR_CUDA, "%s (CUDA error %d: %s) in %s", cudaGetErrorName(error), static_cast<int>(error),
                cudaGetErrorString(error), function);
}

// What other threads record is not disturbed by what this one makes and frees.
class Undisturbed {
 public:
    Undisturbed() : mode_(cudaStreamCaptureModeRelaxed) { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Undisturbed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    Undisturbed(const Undisturbed&) = delete;
    Undisturbed& operator=(const Undisturbed&) = delete;

 private:
    cudaStreamCaptureMode mode_;
};

int32_t mamba_graph_stream(int32_t device, void** stream) {
    Check check("graph_stream");
    check.pointer("stream", stream);
    if (!check.ok()) {
        return check.status();
    }
    const DeviceGuard guard(device);
    const Undisturbed undisturbed;
    cudaStream_t made = nullptr;
    const cudaError_t error =
        guard.error != cudaSuccess ? guard.error : cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    *stream = error == cudaSuccess ? made : nullptr;
    return graph_status(error, "graph_stream");
}

int32_t mamba_graph_begin(int32_t device, void* stream) {
    const DeviceGuard guard(device);
    // Relaxed: what other threads do meanwhile, such as allocating, is neither forbidden nor recorded.
    const cudaError_t error = guard.error != cudaSuccess
                                  ? guard.error
                                  : cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed);
    return graph_status(error, "graph_begin");
}

int32_t mamba_graph_end(int32_t device, void* stream, void** graph) {
    Check check("graph_end");
    check.pointer("graph", graph);
    if (!check.ok()) {
        return check.status();
    }
    const DeviceGuard guard(device);
    const Undisturbed undisturbed;
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t made = nullptr;
    cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &recorded);
    if (error == cudaSuccess) {
        error = cudaGraphInstantiateWithFlags(&made, recorded, 0);
        cudaGraphDestroy(recorded);
    }
    *graph = error == cudaSuccess ? made : nullptr;
    return graph_status(error, "graph_end");
}

int32_t mamba_graph_launch(int32_t device, void* graph, void* stream) {
    Check check("graph_launch");
    check.pointer("graph", graph);
    if (!check.ok()) {
        return check.status();
    }
    const DeviceGuard guard(device);
    cudaError_t error = guard.error;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (error == cudaSuccess) {
        error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
    }
    if (error == cudaSuccess && status != cudaStreamCaptureStatusNone) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "graph_launch: the stream's work is being recorded for another graph");
    }
    if (error == cudaSuccess) {
        error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream));
    }
    return graph_status(error, "graph_launch");
}

int32_t mamba_graph_free(void* graph) {
    Check check("graph_free");
    check.pointer("graph", graph);
    if (!check.ok()) {
        return check.status();
    }
    const Undisturbed undisturbed;
    return graph_status(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "graph_free");
}
