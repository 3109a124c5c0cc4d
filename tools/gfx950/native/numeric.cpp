#include "numeric.h"

namespace gfx950 {

float DECODE[5][256];

static float decode(const Format& f, u32 code) {
    u32 e = code >> f.mantissa & ((1u << f.exponent) - 1), m = code & ((1u << f.mantissa) - 1);
    float x = e ? std::ldexp(1.f + float(m) / float(1 << f.mantissa), int(e) - f.bias)
                : std::ldexp(float(m) / float(1 << f.mantissa), 1 - f.bias);
    return (code >> (f.exponent + f.mantissa) & 1) ? -x : x;
}

static bool fill() {
    for (int k = 0; k < 5; k++)
        for (u32 code = 0; code < (1u << FORMATS[k].width()); code++) DECODE[k][code] = decode(FORMATS[k], code);
    DECODE[IS_FP8][0x7f] = DECODE[IS_FP8][0xff] = NAN;
    for (u32 sign : {0u, 0x80u}) {
        DECODE[IS_BF8][0x7c | sign] = sign ? -INFINITY : INFINITY;
        for (u32 m = 1; m < 4; m++) DECODE[IS_BF8][0x7c | m | sign] = NAN;
    }
    return true;
}
[[maybe_unused]] static const bool filled = fill();

// Codes of one sign are ordered as integers, so the magnitude in units of the target's last place is the code itself
// once the exponent is added; a carry out of the mantissa moves to the next exponent by itself.
u32 encode(const Format& f, float x, bool saturate) {
    u32 sign = (bits(x) >> 31) << (f.exponent + f.mantissa);
    if (x != x) return sign | f.nan;
    float a = std::fabs(x);
    if (a == 0) return sign;
    u32 over = sign | (saturate ? f.largest : f.overflow);
    if (std::isinf(a)) return over;
    int e;
    std::frexp(a, &e);
    e = std::max(e - 1, 1 - f.bias);
    double units = std::nearbyint(std::ldexp(double(a), f.mantissa - e));
    double code = units + std::ldexp(double(e + f.bias - 1), f.mantissa);
    return code > double(f.largest) ? over : sign | u32(code);
}

// Stochastic rounding: the random word is a fraction of the last place, added before truncation.
u32 encode_stochastic(const Format& f, float x, u32 random, bool saturate) {
    u32 sign = (bits(x) >> 31) << (f.exponent + f.mantissa);
    if (x != x) return sign | f.nan;
    float a = std::fabs(x);
    if (a == 0) return sign;
    u32 over = sign | (saturate ? f.largest : f.overflow);
    if (std::isinf(a)) return over;
    int e;
    std::frexp(a, &e);
    e = std::max(e - 1, 1 - f.bias);
    double units = std::floor(std::ldexp(double(a), f.mantissa - e) + std::ldexp(double(random), -32));
    double code = units + std::ldexp(double(e + f.bias - 1), f.mantissa);
    return code > double(f.largest) ? over : sign | u32(code);
}

u32 half_bits_slow(double x) {
    u64 raw = bits64(x);
    u32 sign = u32(raw >> 63) << 15;
    if (x != x) return sign | 0x7e00 | (u32(raw >> 42) & 0x1ff);
    double a = std::fabs(x);
    if (a == 0) return sign;
    if (std::isinf(a)) return sign | 0x7c00;
    int e;
    std::frexp(a, &e);
    e = std::max(e - 1, -14);
    double code = std::nearbyint(std::ldexp(a, 10 - e)) + std::ldexp(double(e + 14), 10);
    return sign | (code >= 0x7c00 ? 0x7c00 : u32(code));
}

u32 half_bits_toward_zero(float x) {
    u32 sign = (bits(x) >> 31) << 15;
    if (x != x) return half_bits_slow(x);
    float a = std::fabs(x);
    if (a == 0) return sign;
    if (std::isinf(a)) return sign | 0x7c00;
    int e;
    std::frexp(a, &e);
    e = std::max(e - 1, -14);
    double code = std::floor(std::ldexp(double(a), 10 - e)) + std::ldexp(double(e + 14), 10);
    return sign | (code >= 0x7c00 ? 0x7bff : u32(code));
}

}  // namespace gfx950
