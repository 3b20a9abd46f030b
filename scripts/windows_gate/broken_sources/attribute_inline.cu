// expect: explicit type is missing
#include <stdint.h>
#include <cuda_runtime.h>
static inline __attribute__((always_inline)) int f(int x) { return x; }
int g() { return f(1); }
