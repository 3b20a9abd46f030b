// Compares the CUDA causal_conv1d and selective_state_update with float64 loops, over a table of options. Built by
// csrc/CMakeLists.txt with -DMAMBA_CUDA=ON -DMAMBA_BUILD_TESTS=ON, or from csrc/ with
//   nvcc -std=c++17 -O3 -arch=native -I. -Iinclude -DMAMBA_BUILD_LIBRARY -o test_conv_update tests/cuda/test_conv_update.cu
//       common/error.cpp common/cuda_library.cu causal_conv1d/cuda*.cu state_update/cuda*.cu
// ./test_conv_update          exits 1 if anything is wrong; also under compute-sanitizer
// ./test_conv_update --time   kernel times beside the copy bandwidth
#include "tests/cuda/cases_conv.h"
#include "tests/cuda/cases_conv_update.h"
#include "tests/cuda/cases_state_update.h"
#include "tests/cuda/harness.h"
#include "tests/cuda/times.h"

int main(int argc, char** argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no CUDA device\n");
        return 77;  // CTest's SKIP_RETURN_CODE
    }
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        print_times();
        return 0;
    }
    test_conv();
    test_conv_plain();
    test_conv_errors();
    test_conv_update();
    test_state_update();
    return finish_tests();
}
