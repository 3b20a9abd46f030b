// expect: expected a ";"
#include <stdint.h>
#include <cuda_runtime.h>
bool f(bool a, bool b) { return a and not b; }
