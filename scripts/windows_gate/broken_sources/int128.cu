// expect: "__int128" is undefined
#include <stdint.h>
#include <cuda_runtime.h>
__int128 f(int64_t a) { return a; }
