// expect: incomplete type "Name<
#include <stdint.h>
#include <cuda_runtime.h>
template <class T> struct Name;
template <> struct Name<long> { static constexpr int v = 1; };
template <> struct Name<int> { static constexpr int v = 2; };
int f() { return Name<int64_t>::v; }
