// expect: 'unistd.h' file not found
#include <stdint.h>
#include <cuda_runtime.h>
#include <unistd.h>
int f() { return getpid(); }
