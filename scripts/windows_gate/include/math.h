// The UCRT's <math.h> as C++ sees it. M_* constants appear only under _USE_MATH_DEFINES, as there.
#pragma once
#include <corecrt.h>
#define INFINITY ((float)(1e+300 * 1e+300))
#define HUGE_VAL ((double)INFINITY)
#define HUGE_VALF INFINITY
#define NAN (-(float)(INFINITY * 0.0F))
#define FP_NORMAL (-1)
#define FP_SUBNORMAL (-2)
#define FP_ZERO 0
#define FP_INFINITE 1
#define FP_NAN 2
#ifdef _USE_MATH_DEFINES
#define M_E 2.71828182845904523536
#define M_LOG2E 1.44269504088896340736
#define M_LOG10E 0.434294481903251827651
#define M_LN2 0.693147180559945309417
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.785398163397448309616
#define M_1_PI 0.318309886183790671538
#define M_2_PI 0.636619772367581343076
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.707106781186547524401
#endif
// UCRT names taking and giving one real number; the float form is exported, the long double form is double's.
#define GATE_MATH1(F)                                                                                                     \
    F(acos)                                                                                                               \
    F(asin) F(atan) F(ceil) F(cos) F(cosh) F(exp) F(floor) F(log) F(log10) F(sin) F(sinh) F(sqrt) F(tan) F(tanh) F(acosh) \
        F(asinh) F(atanh) F(cbrt) F(erf) F(erfc) F(exp2) F(expm1) F(lgamma) F(log1p) F(log2) F(logb) F(nearbyint) F(rint) \
            F(round) F(tgamma) F(trunc)
#define GATE_MATH2(F) F(atan2) F(fmod) F(pow) F(copysign) F(fdim) F(fmax) F(fmin) F(nextafter) F(remainder)
extern "C" {
#define F(n)                                         \
    double __cdecl n(double);                        \
    float __cdecl n##f(float);                       \
    inline long double __cdecl n##l(long double x) { \
        return n((double)x);                         \
    }
GATE_MATH1(F)
#undef F
#define F(n)                                                        \
    double __cdecl n(double, double);                               \
    float __cdecl n##f(float, float);                               \
    inline long double __cdecl n##l(long double x, long double y) { \
        return n((double)x, (double)y);                             \
    }
GATE_MATH2(F)
#undef F
#define F(R, n)                            \
    R __cdecl n(double);                   \
    R __cdecl n##f(float);                 \
    inline R __cdecl n##l(long double x) { \
        return n((double)x);               \
    }
F(int, ilogb)
F(long, lrint) F(long, lround) F(long long, llrint) F(long long, llround)
#undef F
    int __cdecl abs(int);
long __cdecl labs(long);
long long __cdecl llabs(long long);
double __cdecl fabs(double);
inline float __cdecl fabsf(float x) {
    return (float)fabs(x);
}
inline long double __cdecl fabsl(long double x) {
    return fabs((double)x);
}
double __cdecl fma(double, double, double);
float __cdecl fmaf(float, float, float);
double __cdecl frexp(double, int*);
inline float __cdecl frexpf(float x, int* e) {
    return (float)frexp(x, e);
}
double __cdecl ldexp(double, int);
inline float __cdecl ldexpf(float x, int e) {
    return (float)ldexp(x, e);
}
double __cdecl modf(double, double*);
float __cdecl modff(float, float*);
double __cdecl remquo(double, double, int*);
float __cdecl remquof(float, float, int*);
double __cdecl scalbn(double, int);
float __cdecl scalbnf(float, int);
double __cdecl scalbln(double, long);
float __cdecl scalblnf(float, long);
double __cdecl nan(const char*);
float __cdecl nanf(const char*);
double __cdecl _hypot(double, double);
float __cdecl _hypotf(float, float);
double __cdecl hypot(double, double);
inline float __cdecl hypotf(float x, float y) {
    return _hypotf(x, y);
}
double __cdecl _j0(double);
double __cdecl _j1(double);
double __cdecl _jn(int, double);
double __cdecl _y0(double);
double __cdecl _y1(double);
double __cdecl _yn(int, double);
short __cdecl _dclass(double);
short __cdecl _fdclass(float);
short __cdecl _ldclass(long double);
int __cdecl _dsign(double);
int __cdecl _fdsign(float);
int __cdecl _ldsign(long double);
}
inline int fpclassify(float x) throw() {
    return _fdclass(x);
}
inline int fpclassify(double x) throw() {
    return _dclass(x);
}
inline int fpclassify(long double x) throw() {
    return _dclass((double)x);
}
inline bool signbit(float x) throw() {
    return _fdsign(x) != 0;
}
inline bool signbit(double x) throw() {
    return _dsign(x) != 0;
}
inline bool signbit(long double x) throw() {
    return _dsign((double)x) != 0;
}
template <class T>
inline bool isfinite(T x) throw() {
    return fpclassify(x) <= 0;
}
template <class T>
inline bool isinf(T x) throw() {
    return fpclassify(x) == FP_INFINITE;
}
template <class T>
inline bool isnan(T x) throw() {
    return fpclassify(x) == FP_NAN;
}
template <class T>
inline bool isnormal(T x) throw() {
    return fpclassify(x) == FP_NORMAL;
}
template <class T>
inline T _Pow_int(T x, int n) throw() {
    unsigned k = n < 0 ? 0u - n : n;
    T r = 1;
    for (; k; k >>= 1, x *= x)
        if (k & 1)
            r *= x;
    return n < 0 ? T(1) / r : r;
}
