// expect: implicit instantiation of undefined template
#include <stdint.h>
template <typename T>
struct Name;
template <>
struct Name<long> {
    static constexpr int value = 1;
};
int f() {
    return Name<int64_t>::value;
}
