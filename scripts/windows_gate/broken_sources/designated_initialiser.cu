// expect: expected an expression
#include <stdint.h>
#include <cuda_runtime.h>
struct S { int a, b; };
S f() { return S{.a = 1, .b = 2}; }
