// expect: "ssize_t" is undefined
#include <stdint.h>
#include <cuda_runtime.h>
ssize_t f(ssize_t x) { return x; }
