// expect: pointer to a complete object type
#include <stdint.h>
#include <cuda_runtime.h>
void *f(void *p) { return p + 1; }
