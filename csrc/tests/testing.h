// What the native tests share: tensors with strides, values, comparison, and the program around the tests. Each test file is
// one program for each library that it tests; the file is the same. For mamba_cuda (MAMBA_TEST_CUDA) it runs its tests once.
// For mamba_cpu, started plainly, it starts itself once for every instruction set that this CPU has, with MAMBA_SSM_CPU_ISA
// set; started with that variable set it runs its tests.
#pragma once

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "mamba_kernels.h"
#include "tests/memory.h"

namespace testing {

inline int cases = 0;
inline int failures = 0;
inline std::string current_case;

inline void begin_case(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    current_case = text;
    ++cases;
}

inline void report(const char* format, ...) {
    ++failures;
    if (failures > 50) {
        return;
    }
    printf("FAIL %s: ", current_case.c_str());
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

inline bool expect(bool good, const char* what) {
    if (!good) {
        report("%s", what);
    }
    return good;
}
// The call must go well, on the GPU to its end.
inline bool expect_ok(int32_t status) {
    if (status != MAMBA_OK) {
        report("status %d: %s", static_cast<int>(status), mamba_last_error());
        return false;
    }
#if defined(MAMBA_TEST_CUDA)
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
        report("the kernels ended with %s", cudaGetErrorString(error));
        return false;
    }
#endif
    return true;
}
// The call must be refused with this code and a message that holds `words`.
inline void expect_error(int32_t status, int32_t code, const char* words) {
    if (status != code || strstr(mamba_last_error(), words) == nullptr) {
        report("expected error %d saying \"%s\", got %d: %s", static_cast<int>(code), words, static_cast<int>(status),
               status == MAMBA_OK ? "(no error)" : mamba_last_error());
    }
}

// ---- values ----------------------------------------------------------------------------------------------------------

inline uint64_t random_state = 0x9e3779b97f4a7c15ull;
inline uint64_t random_bits() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 11;
}
inline int64_t random_below(int64_t limit) {
    return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(limit));
}
// About normal: mean 0, variance 1.
inline double random_normal() {
    double sum = 0.0;
    for (int i = 0; i < 4; ++i) {
        sum += static_cast<double>(random_bits()) / 9007199254740992.0 - 0.5;
    }
    return sum * 1.7320508;
}

inline int64_t element_size(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 4 : 2;
}

// 2^exponent, a normal double. From its bits: with ldexp, decoding took up to half of the time of a test.
inline double power_of_2(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
// The exponent of a finite double; of zero and subnormal ones below that of any other.
inline int exponent_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return static_cast<int>(bits >> 52 & 0x7ff) - 1023;
}

// The value of a 16-bit float with that many fraction bits, whose exponent bias is that of IEEE formats.
inline double decode16(uint16_t bits, int fraction_bits) {
    const int exponent_bits = 15 - fraction_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const double fraction = bits & ((1 << fraction_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1) {
        value = fraction != 0 ? NAN : HUGE_VAL;
    } else if (exponent == 0) {
        value = fraction * power_of_2(1 - bias - fraction_bits);
    } else {
        value = (fraction + (1 << fraction_bits)) * power_of_2(exponent - bias - fraction_bits);
    }
    return bits & 0x8000 ? -value : value;
}
// Nearest, ties to even. NaN comes out as some NaN.
inline uint16_t encode16(double value, int fraction_bits) {
    const int exponent_bits = 15 - fraction_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) {
        return static_cast<uint16_t>(sign | infinity | 1 << (fraction_bits - 1));
    }
    const double size = fabs(value);
    if (isinf(size)) {
        return static_cast<uint16_t>(sign | infinity);
    }
    const int own = exponent_of(size), exponent = own < 1 - bias ? 1 - bias : own;
    // counts units in the last place from zero, so that a carry runs into the exponent as it should
    const double whole = power_of_2(52);  // a double has no fraction from here on
    const double units = size * power_of_2(fraction_bits - exponent) + whole - whole;
    const double bits = units + static_cast<double>(exponent - (1 - bias)) * (1 << fraction_bits);
    return static_cast<uint16_t>(sign | (bits < infinity ? static_cast<int>(bits) : infinity));
}

inline int fraction_bits(int32_t dtype) {
    return dtype == MAMBA_FLOAT16 ? 10 : 7;
}
inline double read_element(const unsigned char* data, int64_t index, int32_t dtype) {
    if (dtype == MAMBA_FLOAT32) {
        float value;
        memcpy(&value, data + index * 4, 4);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, data + index * 2, 2);
    return decode16(bits, fraction_bits(dtype));
}
inline void write_element(unsigned char* data, int64_t index, int32_t dtype, double value) {
    if (dtype == MAMBA_FLOAT32) {
        const float single = static_cast<float>(value);
        memcpy(data + index * 4, &single, 4);
    } else {
        const uint16_t bits = encode16(value, fraction_bits(dtype));
        memcpy(data + index * 2, &bits, 2);
    }
}
inline double sigmoid(double x) {
    return 1.0 / (1.0 + exp(-x));
}
// Half a unit in the last place, relative.
inline double rounding(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 6.0e-8 : dtype == MAMBA_FLOAT16 ? 4.9e-4 : 3.91e-3;
}

// ---- tensors ---------------------------------------------------------------------------------------------------------

// A tensor of up to four dimensions, with gaps between its rows: all bytes are 0xff (NaN) at first, and bytes in the gaps must
// still be so at the end. order lists the dimensions from the outermost to the innermost; lead counts the elements before the
// first one, which move it off any alignment: as many as in a gap if not given.
struct Tensor {
    int32_t dtype = MAMBA_FLOAT32;
    int64_t size[4] = {0, 0, 0, 0}, stride[4] = {0, 0, 0, 0};
    int64_t lead = 0;
    Memory<unsigned char> bytes;

    Tensor() = default;
    Tensor(int32_t dtype_, std::vector<int64_t> sizes, int64_t gap = 0, std::vector<int> order = {}, int64_t lead_ = -1)
        : dtype(dtype_), lead(lead_ < 0 ? gap : lead_) {
        for (size_t i = 0; i < 4; ++i) {
            size[i] = i < sizes.size() ? sizes[i] : 1;
        }
        if (order.empty()) {
            for (size_t i = 0; i < sizes.size(); ++i) {
                order.push_back(static_cast<int>(i));
            }
        }
        int64_t extent = 1;
        for (size_t i = order.size(); i-- > 0;) {
            stride[order[i]] = extent;
            extent = extent * size[order[i]] + (i + 1 == order.size() ? gap : 0);
        }
        bytes.assign(static_cast<size_t>((lead + extent + gap) * element_size(dtype)), 0xff);
    }
    int64_t index(int64_t i, int64_t j, int64_t k, int64_t l) const {
        return lead + i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
    }
    double get(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const {
        return read_element(bytes.data(), index(i, j, k, l), dtype);
    }
    void set(double value, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
        write_element(bytes.data(), index(i, j, k, l), dtype, value);
    }
    void* data() { return bytes.data() + lead * element_size(dtype); }
    float* floats() { return static_cast<float*>(data()); }

    template <typename Visit>
    void for_each(Visit visit) const {
        for (int64_t i = 0; i < size[0]; ++i) {
            for (int64_t j = 0; j < size[1]; ++j) {
                for (int64_t k = 0; k < size[2]; ++k) {
                    for (int64_t l = 0; l < size[3]; ++l) {
                        visit(i, j, k, l);
                    }
                }
            }
        }
    }
    void fill(double value) {
        for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) { set(value, i, j, k, l); });
    }
    void fill_random(double scale, double shift = 0.0) {
        for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) { set(random_normal() * scale + shift, i, j, k, l); });
    }
    void expect_gaps_untouched(const char* name) const {
        const size_t width = static_cast<size_t>(element_size(dtype));
        std::vector<bool> reached(bytes.size() / width, false);
        for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) { reached[static_cast<size_t>(index(i, j, k, l))] = true; });
        for (size_t e = 0; e < reached.size(); ++e) {
            for (size_t byte = 0; byte < width && !reached[e]; ++byte) {
                if (bytes[e * width + byte] != 0xff) {
                    report("%s was written outside its elements, at %lld", name, static_cast<long long>(e));
                    return;
                }
            }
        }
    }
};

// Of a (batch, channel, time) tensor.
inline std::vector<int> layout(bool channels_last) {
    return channels_last ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2};
}

// Every element of got against want(i, j, k, l): `arithmetic` is what sums in float32 may lose, as a part of the largest
// value that is expected (at least `scale`: sums may be the small rest of large terms), and storing in got's dtype loses half a
// unit of the value itself.
template <typename Want>
void expect_close(const char* name, const Tensor& got, double arithmetic, Want want, double scale = 1e-3) {
    double largest = scale;
    got.for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        const double value = fabs(want(i, j, k, l));
        largest = isfinite(value) && value > largest ? value : largest;
    });
    bool good = true;
    got.for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        const double expected = want(i, j, k, l), value = got.get(i, j, k, l);
        const double tolerance = arithmetic * largest + rounding(got.dtype) * 1.01 * fabs(expected);
        const bool close = isnan(expected)   ? isnan(value)
                           : isinf(expected) ? value == expected
                                             : fabs(value - expected) <= tolerance;
        if (good && !close) {
            good = false;
            report("%s[%lld, %lld, %lld, %lld] is %.9g, expected %.9g (tolerance %.3g)", name, static_cast<long long>(i),
                   static_cast<long long>(j), static_cast<long long>(k), static_cast<long long>(l), value, expected, tolerance);
        }
    });
    got.expect_gaps_untouched(name);
}

// ---- the program -----------------------------------------------------------------------------------------------------

#if defined(MAMBA_TEST_CUDA)

// The body of main: 0 when all tests pass, 77 where there is no GPU.
inline int run_tests(int, char**, void (*tests)()) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no CUDA device\n");
        return 77;
    }
    tests();
    printf("cuda: %d cases, %d failures\n", cases, failures);
    return failures == 0 ? 0 : 1;
}

#else

inline void set_isa(const char* name) {
#if defined(_WIN32)
    _putenv_s("MAMBA_SSM_CPU_ISA", name);
#else
    setenv("MAMBA_SSM_CPU_ISA", name, 1);
#endif
}

// The body of main: 0 when all tests pass on all instruction sets of this CPU.
inline int run_tests(int argc, char** argv, void (*tests)()) {
    MambaLibraryInfo info;
    const char* forced = getenv("MAMBA_SSM_CPU_ISA");
    if (forced != nullptr && forced[0] != '\0') {
        if (mamba_library_info(&info) != MAMBA_OK) {
            printf("%s\n", mamba_last_error());
            return 1;
        }
        tests();
        printf("%s: %d cases, %d failures\n", info.isa, cases, failures);
        return failures == 0 ? 0 : 1;
    }
    if (argc < 1 || mamba_library_info(&info) != MAMBA_OK) {
        printf("%s\n", mamba_last_error());
        return 1;
    }
    int result = 0;
    const char* all[] = {"generic", "avx2", "avx512"};
    for (const char* isa : all) {
        set_isa(isa);
        fflush(stdout);
        result = system(("\"" + std::string(argv[0]) + "\"").c_str()) == 0 ? result : 1;
        if (strcmp(isa, info.isa) == 0) {
            break;  // the best one this CPU has; the next ones it has not
        }
    }
    return result;
}

#endif

}  // namespace testing
