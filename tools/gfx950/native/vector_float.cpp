// Floating-point vector operations: 32, 16 and 64 bits, and the packed forms.
//
// Transcendentals are correctly rounded here; the hardware promises about one unit in the last place. EXP, LOG, RCP,
// RSQ and SQRT of 32 bits take and give denormals as zero, as the hardware does.
#include <algorithm>

#include "numeric.h"

namespace gfx950 {

// minNum / maxNum with the zeros ordered; a signalling NaN wins in IEEE mode.
static inline u32 max_f32(u32 a, u32 b, bool ieee) {
    if (is_nan(a) || is_nan(b)) {
        if (ieee && is_nan(a) && !(a & 0x400000u)) return quiet(a);
        if (ieee && is_nan(b) && !(b & 0x400000u)) return quiet(b);
        return is_nan(a) ? b : a;
    }
    float x = real(a), y = real(b);
    if (x == y) return a & b;  // equal unless the zeros differ in sign
    return x > y ? a : b;
}
static inline u32 min_f32(u32 a, u32 b, bool ieee) {
    if (is_nan(a) || is_nan(b)) return max_f32(a, b, ieee);
    float x = real(a), y = real(b);
    if (x == y) return a | b;
    return x < y ? a : b;
}
static inline u32 maximum_f32(u32 a, u32 b) { return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : max_f32(a, b, false); }
static inline u32 minimum_f32(u32 a, u32 b) { return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : min_f32(a, b, false); }
static inline u32 med3_f32(u32 a, u32 b, u32 c, bool ieee) {
    if (is_nan(a) || is_nan(b) || is_nan(c)) return min_f32(min_f32(a, b, ieee), c, ieee);
    u32 top = max_f32(max_f32(a, b, ieee), c, ieee);
    if (real(top) == real(a)) return max_f32(b, c, ieee);
    if (real(top) == real(b)) return max_f32(a, c, ieee);
    return max_f32(a, b, ieee);
}

#define F1(NAME, VALUE)                       \
    OP(NAME) {                                \
        SourceF32 A(w, I, 0);                 \
        alignas(64) u32 r[LANES];             \
        EACH_LANE {                           \
            float a = A[l];                   \
            r[l] = bits(VALUE);               \
        }                                     \
        commit_f32(w, I, r);                  \
    }
#define F2(NAME, VALUE)                       \
    OP(NAME) {                                \
        SourceF32 A(w, I, 0), B(w, I, 1);     \
        alignas(64) u32 r[LANES];             \
        EACH_LANE {                           \
            float a = A[l], b = B[l];         \
            r[l] = bits(VALUE);               \
        }                                     \
        commit_f32(w, I, r);                  \
    }
#define RAW2(NAME, VALUE)                     \
    OP(NAME) {                                \
        SourceF32 A(w, I, 0), B(w, I, 1);     \
        alignas(64) u32 r[LANES];             \
        bool ieee = w.ieee;                   \
        EACH_LANE {                           \
            u32 a = A.raw(l), b = B.raw(l);   \
            r[l] = (VALUE);                   \
        }                                     \
        (void)ieee;                           \
        commit_f32(w, I, r);                  \
    }
#define RAW3(NAME, VALUE)                                 \
    OP(NAME) {                                            \
        SourceF32 A(w, I, 0), B(w, I, 1), C(w, I, 2);     \
        alignas(64) u32 r[LANES];                         \
        bool ieee = w.ieee;                               \
        EACH_LANE {                                       \
            u32 a = A.raw(l), b = B.raw(l), c = C.raw(l); \
            r[l] = (VALUE);                               \
        }                                                 \
        (void)ieee;                                       \
        commit_f32(w, I, r);                              \
    }

F2(V_ADD_F32, a + b)
F2(V_SUB_F32, a - b)
F2(V_SUBREV_F32, b - a)
F2(V_MUL_F32, a * b)
F2(V_MUL_LEGACY_F32, (a == 0 || b == 0) ? 0.f : a * b)
RAW2(V_MAX_F32, max_f32(a, b, ieee))
RAW2(V_MIN_F32, min_f32(a, b, ieee))
RAW3(V_FMA_F32, bits(__builtin_fmaf(real(a), real(b), real(c))))
RAW3(V_MAX3_F32, max_f32(max_f32(a, b, ieee), c, ieee))
RAW3(V_MIN3_F32, min_f32(min_f32(a, b, ieee), c, ieee))
RAW3(V_MED3_F32, med3_f32(a, b, c, ieee))
RAW3(V_MAXIMUM3_F32, maximum_f32(maximum_f32(a, b), c))
RAW3(V_MINIMUM3_F32, minimum_f32(minimum_f32(a, b), c))

// d = a * b + d, and the forms with a literal factor or addend (lower.py has put the literal in place).
OP(V_FMAC_F32) {
    SourceF32 A(w, I, 0), B(w, I, 1);
    const u32* d = w.row(I.dst);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = bits(__builtin_fmaf(A[l], B[l], real(w.flush32 ? flush(d[l]) : d[l])));
    commit_f32(w, I, r);
}
RAW3(V_FMAMK_F32, bits(__builtin_fmaf(real(a), real(b), real(c))))
RAW3(V_FMAAK_F32, bits(__builtin_fmaf(real(a), real(b), real(c))))

OP(V_CNDMASK_B32) {
    SourceF32 A(w, I, 0), B(w, I, 1);
    alignas(64) u32 r[LANES], mask[LANES];
    expand(w.s64(I.c), mask);
    if (w.flush32 && !((I.neg | I.abs) & 3)) {  // a plain move never flushes
        Source X(w, I, 0), Y(w, I, 1);
        EACH_LANE r[l] = (Y[l] & mask[l]) | (X[l] & ~mask[l]);
    } else {
        EACH_LANE r[l] = (B.raw(l) & mask[l]) | (A.raw(l) & ~mask[l]);
    }
    commit(w, I, r);
}

// Denormals count as zero on both sides.
#define TRANSCENDENTAL(NAME, VALUE)                   \
    OP(NAME) {                                        \
        SourceF32 A(w, I, 0);                         \
        alignas(64) u32 r[LANES];                     \
        EACH_LANE {                                   \
            double a = double(real(flush(A.raw(l)))); \
            r[l] = flush(bits(float(VALUE)));         \
        }                                             \
        commit_f32(w, I, r);                          \
    }
TRANSCENDENTAL(V_EXP_F32, std::exp2(a))
TRANSCENDENTAL(V_LOG_F32, std::log2(a))
TRANSCENDENTAL(V_RCP_F32, 1.0 / a)
TRANSCENDENTAL(V_RCP_IFLAG_F32, 1.0 / a)
TRANSCENDENTAL(V_RSQ_F32, 1.0 / std::sqrt(a))
TRANSCENDENTAL(V_SQRT_F32, std::sqrt(a))
constexpr double TURN = 6.283185307179586476925286766559;
F1(V_SIN_F32, std::fabs(a) > 256.f ? (std::isinf(a) ? NAN : 0.f) : float(std::sin(double(a) * TURN)))
F1(V_COS_F32, std::fabs(a) > 256.f ? (std::isinf(a) ? NAN : 1.f) : float(std::cos(double(a) * TURN)))

F1(V_RNDNE_F32, __builtin_rintf(a))
F1(V_FLOOR_F32, __builtin_floorf(a))
F1(V_CEIL_F32, __builtin_ceilf(a))
F1(V_TRUNC_F32, __builtin_truncf(a))
F1(V_FRACT_F32, std::isfinite(a) ? std::min(a - std::floor(a), 0x1.fffffep-1f) : NAN)
F1(V_FREXP_MANT_F32, (std::isfinite(a) && a != 0) ? [](float x) { int e; return std::frexp(x, &e); }(a) : a)
OP(V_FREXP_EXP_I32_F32) {
    SourceF32 A(w, I, 0);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        int e = 0;
        if (std::isfinite(A[l]) && A[l] != 0) std::frexp(A[l], &e);
        r[l] = u32(e);
    }
    commit(w, I, r);
}
OP(V_LDEXP_F32) {
    SourceF32 A(w, I, 0);
    Source B(w, I, 1);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = bits(std::ldexp(A[l], std::clamp(i32(B[l]), -1000, 1000)));
    commit_f32(w, I, r);
}

// ---- the division sequence: scale, fused multiply-adds, fix up -----------------------------------------------------------

static inline int exponent_of(float x) { return int(bits(x) >> 23 & 255); }
static inline bool denormal(float x) { return x != 0 && !(bits(x) & 0x7f800000u); }

OP(V_DIV_SCALE_F32) {
    SourceF32 A(w, I, 0), B(w, I, 1), C(w, I, 2);  // the value to scale, the denominator, the numerator
    alignas(64) u32 r[LANES];
    u64 scaled = 0;
    EACH_LANE {
        float x = A[l], d = B[l], n = C[l], out = x;
        bool post = false;
        if (n == 0 || d == 0) {
            out = NAN;
        } else if (exponent_of(n) - exponent_of(d) >= 96) {  // the quotient is near the top
            post = true;
            if (x == d) out = std::ldexp(x, 64);
        } else if (denormal(d)) {
            out = std::ldexp(x, 64);
        } else {
            bool tiny_reciprocal = std::fpclassify(1.0f / d) == FP_SUBNORMAL;
            bool tiny_quotient = std::fpclassify(n / d) == FP_SUBNORMAL || (n / d == 0);
            if (tiny_reciprocal && tiny_quotient) {  // a smaller denominator makes the quotient normal; DIV_FMAS undoes it
                post = true;
                if (x == d) out = std::ldexp(x, -64);
            } else if (tiny_reciprocal) {
                out = std::ldexp(x, -64);
            } else if (tiny_quotient) {
                post = true;
                if (x == n) out = std::ldexp(x, 64);
            } else if (exponent_of(n) <= 23) {
                out = std::ldexp(x, 64);
            }
        }
        r[l] = bits(out);
        scaled |= u64(post) << l;
    }
    commit(w, I, r);
    commit_mask(w, I, I.dst2, scaled);
}
OP(V_DIV_FMAS_F32) {
    SourceF32 A(w, I, 0), B(w, I, 1), C(w, I, 2);
    u64 post = w.s64(VCC);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        float f = __builtin_fmaf(A[l], B[l], C[l]);
        if (post >> l & 1) {  // undo the scaling; one rounding, from the exact sum
            int up = exponent_of(C[l]) > 127 ? 64 : -64;
            double exact = std::fma(double(A[l]), double(B[l]), double(C[l]));
            f = float(std::ldexp(exact, up));
        }
        r[l] = bits(f);
    }
    commit_f32(w, I, r);
}
OP(V_DIV_FIXUP_F32) {
    SourceF32 A(w, I, 0), B(w, I, 1), C(w, I, 2);  // the quotient, the denominator, the numerator
    alignas(64) u32 r[LANES];
    EACH_LANE {
        u32 q = A.raw(l), sign = (B.raw(l) ^ C.raw(l)) & 0x80000000u;
        float d = B[l], n = C[l];
        if (n != n) r[l] = quiet(C.raw(l));
        else if (d != d) r[l] = quiet(B.raw(l));
        else if ((d == 0 && n == 0) || (std::isinf(d) && std::isinf(n))) r[l] = 0xffc00000u;
        else if (d == 0 || std::isinf(n)) r[l] = sign | 0x7f800000u;
        else if (std::isinf(d) || n == 0) r[l] = sign;
        else if (exponent_of(n) - exponent_of(d) < -150) r[l] = sign;
        else if (exponent_of(n) - exponent_of(d) >= 129) r[l] = sign | 0x7f800000u;  // the steps before may have made inf - inf
        else r[l] = (q & 0x7fffffffu) | sign;
    }
    commit_f32(w, I, r);
}

// ---- 16 bits -------------------------------------------------------------------------------------------------------------

static void output_half(const Wave& w, const Ins& I, double x, u32& r) {
    if (I.omod) x *= I.omod == 1 ? 2 : I.omod == 2 ? 4 : 0.5;
    if (I.clamp) x = x > 1 ? 1 : x > 0 ? x : 0;
    r = half_in_mode(w, x, half_result(x));
}
struct HalfSource {
    Source16 raw;
    bool flushed;
    HalfSource(Wave& w, const Ins& I, int k) : raw(w, I, k, true), flushed(w.flush16) {}
    u32 code(int l) const {
        u32 h = raw[l];
        return flushed && !(h & 0x7c00) ? h & 0x8000 : h;
    }
    double operator[](int l) const { return double(half_real(code(l))); }
};
#define H1(NAME, VALUE)                        \
    OP(NAME) {                                 \
        HalfSource A(w, I, 0);                 \
        alignas(64) u32 r[LANES];              \
        EACH_LANE {                            \
            double a = A[l];                   \
            output_half(w, I, (VALUE), r[l]);  \
        }                                      \
        commit_16(w, I, r);                    \
    }
#define H2(NAME, VALUE)                        \
    OP(NAME) {                                 \
        HalfSource A(w, I, 0), B(w, I, 1);     \
        alignas(64) u32 r[LANES];              \
        EACH_LANE {                            \
            double a = A[l], b = B[l];         \
            output_half(w, I, (VALUE), r[l]);  \
        }                                      \
        commit_16(w, I, r);                    \
    }
#define H3(NAME, VALUE)                                    \
    OP(NAME) {                                             \
        HalfSource A(w, I, 0), B(w, I, 1), C(w, I, 2);     \
        alignas(64) u32 r[LANES];                          \
        EACH_LANE {                                        \
            double a = A[l], b = B[l], c = C[l];           \
            output_half(w, I, (VALUE), r[l]);              \
        }                                                  \
        commit_16(w, I, r);                                \
    }
static inline double max_num(double a, double b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : std::max(a, b); }
static inline double min_num(double a, double b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : std::min(a, b); }
static inline double med_num(double a, double b, double c) {
    if (a != a || b != b || c != c) return min_num(min_num(a, b), c);
    return max_num(min_num(a, b), min_num(max_num(a, b), c));
}
H2(V_ADD_F16, a + b)
H2(V_SUB_F16, a - b)
H2(V_SUBREV_F16, b - a)
H2(V_MUL_F16, a * b)
H2(V_MAX_F16, max_num(a, b))
H2(V_MIN_F16, min_num(a, b))
H3(V_FMA_F16, std::fma(a, b, c))
H3(V_MIN3_F16, min_num(min_num(a, b), c))
H3(V_MAX3_F16, max_num(max_num(a, b), c))
H3(V_MED3_F16, med_num(a, b, c))
H1(V_RCP_F16, 1 / a)
H1(V_SQRT_F16, std::sqrt(a))
H1(V_RSQ_F16, 1 / std::sqrt(a))
H1(V_EXP_F16, std::exp2(a))
H1(V_LOG_F16, std::log2(a))
H1(V_FLOOR_F16, std::floor(a))
H1(V_CEIL_F16, std::ceil(a))
H1(V_TRUNC_F16, std::trunc(a))
H1(V_RNDNE_F16, std::nearbyint(a))
H1(V_FRACT_F16, std::isfinite(a) ? std::min(a - std::floor(a), 0.99951171875) : NAN)
OP(V_LDEXP_F16) {
    HalfSource A(w, I, 0);
    Source16 B(w, I, 1, false);
    alignas(64) u32 r[LANES];
    EACH_LANE output_half(w, I, std::ldexp(A[l], i16(B[l])), r[l]);
    commit_16(w, I, r);
}

// Mixed: each operand is a float, or a half when op_sel_hi says so (op_sel then picks which); abs is neg_hi here.
static void mixed(Wave& w, const Ins& I, float* out) {
    Source S[3] = {Source(w, I, 0), Source(w, I, 1), Source(w, I, 2)};
    EACH_LANE {
        float x[3];
        for (int k = 0; k < 3; k++) {
            u32 raw = S[k][l];
            float f = !(I.opsel_hi >> k & 1) ? real(raw) : half_real((I.opsel >> k & 1) ? raw >> 16 : raw & 0xffff);
            if (I.neg_hi >> k & 1) f = std::fabs(f);
            x[k] = (I.neg >> k & 1) ? -f : f;
        }
        out[l] = __builtin_fmaf(x[0], x[1], x[2]);
        if (I.clamp) out[l] = out[l] > 1 ? 1.f : out[l] > 0 ? out[l] : 0.f;
    }
}
OP(V_MAD_MIX_F32) {
    alignas(64) float f[LANES];
    mixed(w, I, f);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = bits(f[l]);
    commit(w, I, r);
}
OP(V_MAD_MIXLO_F16) {
    alignas(64) float f[LANES];
    mixed(w, I, f);
    const u32* d = w.row(I.dst);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = (d[l] & 0xffff0000u) | half_in_mode(w, f[l], half_bits(f[l]));
    commit(w, I, r);
}
OP(V_MAD_MIXHI_F16) {
    alignas(64) float f[LANES];
    mixed(w, I, f);
    const u32* d = w.row(I.dst);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = (d[l] & 0xffff) | half_in_mode(w, f[l], half_bits(f[l])) << 16;
    commit(w, I, r);
}

// ---- 64 bits -------------------------------------------------------------------------------------------------------------

static inline double output_double(const Ins& I, double x) {
    if (I.omod) x *= I.omod == 1 ? 2 : I.omod == 2 ? 4 : 0.5;
    if (I.clamp) x = x > 1 ? 1 : x > 0 ? x : 0;
    return x;
}
#define D1(NAME, VALUE)                                       \
    OP(NAME) {                                                \
        SourceF64 A(w, I, 0);                                 \
        u64 r[LANES];                                         \
        EACH_LANE {                                           \
            double a = A[l];                                  \
            r[l] = bits64(output_double(I, (VALUE)));         \
        }                                                     \
        commit_64(w, I, r);                                   \
    }
#define D2(NAME, VALUE)                                       \
    OP(NAME) {                                                \
        SourceF64 A(w, I, 0), B(w, I, 1);                     \
        u64 r[LANES];                                         \
        EACH_LANE {                                           \
            double a = A[l], b = B[l];                        \
            r[l] = bits64(output_double(I, (VALUE)));         \
        }                                                     \
        commit_64(w, I, r);                                   \
    }
D2(V_ADD_F64, a + b)
D2(V_MUL_F64, a * b)
// A signalling NaN wins in IEEE mode, as with 32 bits.
static inline bool signals(const Wave& w, double x) { return w.ieee && x != x && !(bits64(x) >> 51 & 1); }
static inline double quiet(double x) { return real64(bits64(x) | u64(1) << 51); }
D2(V_MAX_F64, signals(w, a) ? quiet(a) : signals(w, b) ? quiet(b) : max_num(a, b))
D2(V_MIN_F64, signals(w, a) ? quiet(a) : signals(w, b) ? quiet(b) : min_num(a, b))
D1(V_RCP_F64, 1 / a)
D1(V_RSQ_F64, 1 / std::sqrt(a))
D1(V_SQRT_F64, std::sqrt(a))
D1(V_FLOOR_F64, std::floor(a))
D1(V_CEIL_F64, std::ceil(a))
D1(V_TRUNC_F64, std::trunc(a))
D1(V_RNDNE_F64, std::nearbyint(a))
OP(V_FMA_F64) {
    SourceF64 A(w, I, 0), B(w, I, 1), C(w, I, 2);
    u64 r[LANES];
    EACH_LANE r[l] = bits64(output_double(I, std::fma(A[l], B[l], C[l])));
    commit_64(w, I, r);
}
OP(V_FMAC_F64) {
    SourceF64 A(w, I, 0), B(w, I, 1);
    Source64 D(w, I.dst);
    u64 r[LANES];
    EACH_LANE r[l] = bits64(output_double(I, std::fma(A[l], B[l], real64(D[l]))));
    commit_64(w, I, r);
}
OP(V_LDEXP_F64) {
    SourceF64 A(w, I, 0);
    Source B(w, I, 1);
    u64 r[LANES];
    EACH_LANE r[l] = bits64(output_double(I, std::ldexp(A[l], std::clamp(i32(B[l]), -5000, 5000))));
    commit_64(w, I, r);
}

D1(V_FRACT_F64, std::isfinite(a) ? std::min(a - std::floor(a), 0x1.fffffffffffffp-1) : NAN)
D1(V_FREXP_MANT_F64, (std::isfinite(a) && a != 0) ? [](double x) { int e; return std::frexp(x, &e); }(a) : a)
OP(V_FREXP_EXP_I32_F64) {
    SourceF64 A(w, I, 0);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        int e = 0;
        if (std::isfinite(A[l]) && A[l] != 0) std::frexp(A[l], &e);
        r[l] = u32(e);
    }
    commit(w, I, r);
}

// The division sequence of doubles: as for singles, with steps of 2^128.
static inline int exponent_of(double x) { return int(bits64(x) >> 52 & 2047); }
static inline bool denormal(double x) { return x != 0 && !exponent_of(x); }
OP(V_DIV_SCALE_F64) {
    SourceF64 A(w, I, 0), B(w, I, 1), C(w, I, 2);  // the value to scale, the denominator, the numerator
    u64 r[LANES], scaled = 0;
    EACH_LANE {
        double x = A[l], d = B[l], n = C[l], out = x;
        bool post = false;
        if (n == 0 || d == 0) {
            out = NAN;
        } else if (exponent_of(n) - exponent_of(d) >= 768) {
            post = true;
            if (x == d) out = std::ldexp(x, 128);
        } else if (denormal(d)) {
            out = std::ldexp(x, 128);
        } else {
            bool tiny_reciprocal = denormal(1 / d), tiny_quotient = denormal(n / d) || n / d == 0;
            post = tiny_quotient;
            if (tiny_reciprocal) out = (!tiny_quotient || x == d) ? std::ldexp(x, -128) : x;
            else if (tiny_quotient) out = x == n ? std::ldexp(x, 128) : x;
            else if (exponent_of(n) <= 53) out = std::ldexp(x, 128);
        }
        r[l] = bits64(out);
        scaled |= u64(post) << l;
    }
    commit_64(w, I, r);
    commit_mask(w, I, I.dst2, scaled);
}
OP(V_DIV_FMAS_F64) {
    SourceF64 A(w, I, 0), B(w, I, 1), C(w, I, 2);
    u64 r[LANES], post = w.s64(VCC);
    EACH_LANE {
        double f = std::fma(A[l], B[l], C[l]);
        if (post >> l & 1) f = std::ldexp(f, exponent_of(C[l]) > 1023 ? 128 : -128);
        r[l] = bits64(output_double(I, f));
    }
    commit_64(w, I, r);
}
OP(V_DIV_FIXUP_F64) {
    SourceF64 A(w, I, 0), B(w, I, 1), C(w, I, 2);  // the quotient, the denominator, the numerator
    u64 r[LANES];
    constexpr u64 top = u64(1) << 63, quiet_bit = u64(1) << 51, infinity = u64(2047) << 52;
    EACH_LANE {
        u64 sign = (B.raw(l) ^ C.raw(l)) & top;
        double d = B[l], n = C[l];
        int apart = exponent_of(n) - exponent_of(d);
        if (n != n) r[l] = C.raw(l) | quiet_bit;
        else if (d != d) r[l] = B.raw(l) | quiet_bit;
        else if ((d == 0 && n == 0) || (std::isinf(d) && std::isinf(n))) r[l] = top | infinity | quiet_bit;
        else if (d == 0 || std::isinf(n) || apart >= 1025) r[l] = sign | infinity;
        else if (std::isinf(d) || n == 0 || apart < -1075) r[l] = sign;
        else r[l] = (A.raw(l) & ~top) | sign;
    }
    commit_64(w, I, r);
}

}  // namespace gfx950
