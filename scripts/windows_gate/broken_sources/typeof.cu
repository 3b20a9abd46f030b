// expect: "__typeof__" is undefined
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { __typeof__(x) y = x; return y; }
