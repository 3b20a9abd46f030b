// Angles in turns: a turn's whole part is dropped, so that angles stay exact however often they went round.
#pragma once

#include "common/cpu_vector.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

constexpr float kPi = 3.14159265f;
// 2 pi and 1 / (2 pi): the nearest float, and what it lacks.
constexpr float kTurn = 6.28318548f, kTurnRest = -1.74845553e-7f;
constexpr float kPerRadian = 0.159154937f, kPerRadianRest = 6.42063824e-9f;

// tanh(x) to about two ulp, also near 0: x + x^3 P(x^2) there (a minimax fit), 1 - 2 / (e^2x + 1) elsewhere.
MAMBA_INLINE Vec tanh(Vec x) {
    const Vec one = set1(1.0f);
    const Vec z = x * x;
    Vec p = set1(2.06469e-3f);
    p = fma(p, z, set1(-8.0920e-3f));
    p = fma(p, z, set1(2.166637e-2f));
    p = fma(p, z, set1(-5.394057e-2f));
    p = fma(p, z, set1(1.3333158e-1f));
    p = fma(p, z, set1(-3.3333333e-1f));
    const Vec near = fma(x * z, p, x);
    const Vec far = one - set1(2.0f) / (exp(x + x) + one);
    return select_greater(set1(0.4f), z, near, far);
}

// A number of turns in [-1/2, 1/2], as a float and what it lacks.
struct Turns {
    Vec high, low;
};

// turns + step, less what is whole.
MAMBA_INLINE Turns add_turns(Turns turns, Vec step) {
    step = step - round_nearest(step);
    const Vec sum = turns.high + step;
    const Vec part = sum - turns.high;
    const Vec lost = (turns.high - (sum - part)) + (step - part);
    const Vec rest = turns.low + lost;
    const Vec kept = sum - round_nearest(sum);
    const Vec high = kept + rest;
    return {high, rest - (high - kept)};
}

// Series in the distance to the nearest quarter of a turn.
MAMBA_INLINE void sin_cos(Turns turns, Vec& sin, Vec& cos) {
    const Vec quarter = round_nearest(turns.high * set1(4.0f));
    const Vec rest = fma(quarter, set1(-0.25f), turns.high) + turns.low;
    const Vec x = rest * set1(kTurn);
    const Vec z = x * x;
    Vec s = set1(2.7557319e-6f);
    s = fma(s, z, set1(-1.9841270e-4f));
    s = fma(s, z, set1(8.3333333e-3f));
    s = fma(s, z, set1(-1.6666667e-1f));
    s = fma(x * z, s, x);
    Vec c = set1(-2.7557319e-7f);
    c = fma(c, z, set1(2.4801587e-5f));
    c = fma(c, z, set1(-1.3888889e-3f));
    c = fma(c, z, set1(4.1666667e-2f));
    c = fma(c, z, set1(-0.5f));
    c = fma(c, z, set1(1.0f));
    const Vec square = quarter * quarter, quarters = set1(0.5f), half = set1(2.5f);  // 0, 1 or 4
    const Vec opposite_cos = zero() - c, opposite_sin = zero() - s;
    cos = select_greater(square, half, opposite_cos, select_greater(square, quarters, zero() - quarter * s, c));
    sin = select_greater(square, half, opposite_sin, select_greater(square, quarters, quarter * c, s));
}

// In [0, 2 pi), and back. A step of decoding takes this way each time: an error with a sign would grow with their number.
MAMBA_INLINE Vec radians(Turns turns) {
    const Vec one = set1(1.0f);
    const Vec next = turns.high + one, lost = turns.high - (next - one);
    const Vec negative = zero() - (turns.high + turns.low);
    const Vec high = select_greater(negative, zero(), next, turns.high);
    const Vec low = select_greater(negative, zero(), turns.low + lost, turns.low);
    const Vec angle = fma(high, set1(kTurn), fma(low, set1(kTurn), high * set1(kTurnRest)));
    return select_greater(angle, set1(6.28318501f), zero(), angle);
}
MAMBA_INLINE Turns turns_of(Vec radians) {
    const Vec scale = set1(kPerRadian), high = radians * scale;
    return add_turns({zero(), fma(radians, scale, zero() - high) + radians * set1(kPerRadianRest)}, high);
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
