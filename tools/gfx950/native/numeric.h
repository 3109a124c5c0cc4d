// Narrow floats: tables for reading, round-to-nearest-even for writing, with the saturation rule as an argument.
#pragma once
#include <cmath>

#include "core.h"

namespace gfx950 {

struct Format {
    int exponent, mantissa, bias;
    u32 largest;   // code of the largest finite value
    u32 overflow;  // code written on overflow when not saturating (NaN or infinity); the largest where there is neither
    u32 nan;       // code written for NaN
    constexpr int width() const { return 1 + exponent + mantissa; }
};

// OCP formats. FP6 and FP4 have neither infinity nor NaN.
constexpr Format FP8{4, 3, 7, 0x7e, 0x7f, 0x7f}, BF8{5, 2, 15, 0x7b, 0x7c, 0x7f};
constexpr Format FP6{2, 3, 1, 0x1f, 0x1f, 0x1f}, BF6{3, 2, 3, 0x1f, 0x1f, 0x1f}, FP4{2, 1, 1, 0x7, 0x7, 0x7};
enum FormatIndex { IS_FP8, IS_BF8, IS_FP6, IS_BF6, IS_FP4 };
constexpr Format FORMATS[5] = {FP8, BF8, FP6, BF6, FP4};

extern float DECODE[5][256];  // value of every code

u32 encode(const Format& f, float x, bool saturate);
u32 encode_stochastic(const Format& f, float x, u32 random, bool saturate);

inline float bf16_real(u32 h) { return real(h << 16); }
inline u32 bf16_bits(float f) {
    u32 x = bits(f);
    if ((x & 0x7fffffffu) > 0x7f800000u) return (x >> 16) | 0x40;
    return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}

inline float half_real(u32 h) {
#if defined(__F16C__) || defined(__aarch64__)
    _Float16 f;
    u16 x = u16(h);
    std::memcpy(&f, &x, 2);
    return float(f);
#else
    u32 e = h >> 10 & 31, m = h & 1023;
    float f = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(float(1024 + m), int(e) - 25) : std::ldexp(float(m), -24);
    return (h & 0x8000) ? -f : f;
#endif
}
u32 half_bits_slow(double x);  // any value, one rounding
inline u32 half_bits(float f) {
#if defined(__F16C__) || defined(__aarch64__)
    _Float16 h = _Float16(f);
    u16 x;
    std::memcpy(&x, &h, 2);
    return x;
#else
    return half_bits_slow(f);
#endif
}
u32 half_bits_toward_zero(float f);
// What the mode makes of h, the half that x rounds to: denormals flushed, overflow to the largest value.
inline u32 half_in_mode(const Wave& w, double x, u32 h) {
    if (w.flush16 && !(h & 0x7c00)) return h & 0x8000;
    if (w.fp16_ovfl && (h & 0x7fff) == 0x7c00 && std::isfinite(x)) return (h & 0x8000) | 0x7bff;
    return h;
}
// The result of a half operation computed in double and rounded once (exact for +, *, and fused multiply-add).
inline u32 half_result(double x) { return half_bits_slow(x); }

// A narrow code as a float, in plain integer steps so that loops over lanes become vector code. E8M0-less formats only:
// EXPONENT and MANTISSA bits, and whether the top exponent means infinity or NaN (INF), or only its last code NaN (LAST).
template <int EXPONENT, int MANTISSA, int BIAS, bool INF, bool LAST>
inline float narrow(u32 x) {
    constexpr u32 low = (1u << (EXPONENT + MANTISSA)) - 1, top = ((1u << EXPONENT) - 1) << MANTISSA;
    u32 v = (x & low) << (23 - MANTISSA);
    float normal = real(v + (u32(127 - BIAS) << 23));
    float denormal = real(v + (u32(128 - BIAS) << 23)) - real(u32(128 - BIAS) << 23);
    u32 r = bits((x & top) ? normal : denormal);
    if (INF) r = (x & top) == top ? v | 0x7f800000u : r;
    if (LAST) r = (x & low) == low ? 0x7fc00000u : r;
    return real(r | (x >> (EXPONENT + MANTISSA) & 1) << 31);
}

inline float exponent_scale(u32 e) { return e == 255 ? NAN : std::ldexp(1.f, int(e) - 127); }  // E8M0

inline bool is_nan(u32 x) { return (x & 0x7fffffffu) > 0x7f800000u; }
inline u32 quiet(u32 x) { return x | 0x400000u; }
inline u32 flush(u32 x) { return (x & 0x7f800000u) ? x : x & 0x80000000u; }

}  // namespace gfx950
