// Conversions between number formats.
#include <algorithm>

#include "numeric.h"

namespace gfx950 {

#define FROM_F32(NAME, VALUE)                \
    OP(NAME) {                               \
        SourceF32 A(w, I, 0);                \
        alignas(64) u32 r[LANES];            \
        EACH_LANE {                          \
            float a = A[l];                  \
            r[l] = u32(VALUE);               \
        }                                    \
        commit(w, I, r);                     \
    }
#define TO_F32(NAME, VALUE)                  \
    OP(NAME) {                               \
        Source A(w, I, 0);                   \
        alignas(64) u32 r[LANES];            \
        EACH_LANE {                          \
            u32 a = A[l];                    \
            r[l] = bits(float(VALUE));       \
        }                                    \
        commit_f32(w, I, r);                 \
    }
template <class T>
static inline T clipped(double x) {  // toward zero, NaN to 0, out of range to the end
    if (!(x == x)) return 0;
    double low = double(std::numeric_limits<T>::min()), high = double(std::numeric_limits<T>::max());
    return x <= low ? std::numeric_limits<T>::min() : x >= high ? std::numeric_limits<T>::max() : T(x);
}
FROM_F32(V_CVT_U32_F32, clipped<u32>(a))
FROM_F32(V_CVT_I32_F32, clipped<i32>(a))
FROM_F32(V_CVT_RPI_I32_F32, clipped<i32>(std::floor(double(a) + 0.5)))
FROM_F32(V_CVT_FLR_I32_F32, clipped<i32>(std::floor(double(a))))
TO_F32(V_CVT_F32_U32, a)
TO_F32(V_CVT_F32_I32, i32(a))
TO_F32(V_CVT_F32_UBYTE0, a & 255)
TO_F32(V_CVT_F32_UBYTE1, a >> 8 & 255)
TO_F32(V_CVT_F32_UBYTE2, a >> 16 & 255)
TO_F32(V_CVT_F32_UBYTE3, a >> 24)
TO_F32(V_CVT_OFF_F32_I4, (i32(a << 28) >> 28) / 16.0f)

// ---- halves and bfloats --------------------------------------------------------------------------------------------------

OP(V_CVT_F16_F32) {
    SourceF32 A(w, I, 0);
    alignas(64) u32 f[LANES], r[LANES];
    EACH_LANE f[l] = A.raw(l);
    if (I.omod | I.clamp) output_modifiers(w, I, f);
    EACH_LANE r[l] = half_in_mode(w, real(f[l]), half_bits(real(f[l])));
    commit_16(w, I, r);
}
OP(V_CVT_F32_F16) {
    Source16 A(w, I, 0, true);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = bits(half_real(w.flush16 && !(A[l] & 0x7c00) ? A[l] & 0x8000 : A[l]));
    commit_f32(w, I, r);
}
OP(V_CVT_F32_BF16) {
    Source16 A(w, I, 0, true);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = A[l] << 16;
    commit_f32(w, I, r);
}
#define HALF_TO(NAME, VALUE)                                   \
    OP(NAME) {                                                 \
        Source16 A(w, I, 0, true);                             \
        alignas(64) u32 r[LANES];                              \
        EACH_LANE {                                            \
            float a = half_real(A[l]);                         \
            r[l] = u32(VALUE);                                 \
        }                                                      \
        commit_16(w, I, r);                                    \
    }
HALF_TO(V_CVT_U16_F16, clipped<u16>(a))
HALF_TO(V_CVT_I16_F16, clipped<i16>(a))
#define TO_HALF(NAME, VALUE)                                   \
    OP(NAME) {                                                 \
        Source16 A(w, I, 0, false);                            \
        alignas(64) u32 r[LANES];                              \
        EACH_LANE {                                            \
            u32 a = A[l];                                      \
            r[l] = half_in_mode(w, VALUE, half_bits(float(VALUE))); \
        }                                                      \
        commit_16(w, I, r);                                    \
    }
TO_HALF(V_CVT_F16_U16, a)
TO_HALF(V_CVT_F16_I16, i16(a))

#define PACK_TWO(NAME, VALUE)                                  \
    OP(NAME) {                                                 \
        SourceF32 A(w, I, 0), B(w, I, 1);                      \
        alignas(64) u32 r[LANES];                              \
        EACH_LANE {                                            \
            float a = A[l], b = B[l];                          \
            r[l] = (VALUE);                                    \
        }                                                      \
        commit(w, I, r);                                       \
    }
PACK_TWO(V_CVT_PK_BF16_F32, bf16_bits(a) | bf16_bits(b) << 16)
PACK_TWO(V_CVT_PK_F16_F32, half_in_mode(w, a, half_bits(a)) | half_in_mode(w, b, half_bits(b)) << 16)
PACK_TWO(V_CVT_PKRTZ_F16_F32, half_bits_toward_zero(a) | half_bits_toward_zero(b) << 16)
static inline u32 norm(float x, double scale) { return u32(i32(std::nearbyint(clipped<i32>(0) + (x == x ? std::clamp(double(x), scale == 65535 ? 0.0 : -1.0, 1.0) : 0.0) * scale))) & 0xffff; }
PACK_TWO(V_CVT_PKNORM_I16_F32, norm(a, 32767) | norm(b, 32767) << 16)
PACK_TWO(V_CVT_PKNORM_U16_F32, norm(a, 65535) | norm(b, 65535) << 16)
OP(V_CVT_PK_U8_F32) {
    SourceF32 A(w, I, 0);
    Source B(w, I, 1), C(w, I, 2);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        u32 at = 8 * (B[l] & 3), x = A[l] == A[l] ? u32(std::nearbyint(std::clamp(A[l], 0.f, 255.f))) : 0;
        r[l] = (C[l] & ~(255u << at)) | x << at;
    }
    commit(w, I, r);
}

// ---- doubles ---------------------------------------------------------------------------------------------------------------

OP(V_CVT_F32_F64) {
    SourceF64 A(w, I, 0);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = bits(float(A[l]));
    commit_f32(w, I, r);
}
#define FROM_F64(NAME, TYPE)                                   \
    OP(NAME) {                                                 \
        SourceF64 A(w, I, 0);                                  \
        alignas(64) u32 r[LANES];                              \
        EACH_LANE r[l] = u32(clipped<TYPE>(A[l]));             \
        commit(w, I, r);                                       \
    }
FROM_F64(V_CVT_I32_F64, i32)
FROM_F64(V_CVT_U32_F64, u32)
#define TO_F64(NAME, SOURCE, VALUE)                            \
    OP(NAME) {                                                 \
        SOURCE A(w, I, 0);                                     \
        u64 r[LANES];                                          \
        EACH_LANE r[l] = bits64(double(VALUE));                \
        commit_64(w, I, r);                                    \
    }
TO_F64(V_CVT_F64_F32, SourceF32, A[l])
TO_F64(V_CVT_F64_I32, Source, i32(A[l]))
TO_F64(V_CVT_F64_U32, Source, A[l])

// ---- eight-bit floats ------------------------------------------------------------------------------------------------------

// Bytes of the destination outside [at, at + width) keep their value.
template <class F>
static void insert(Wave& w, const Ins& I, u32 at, u32 width, F f) {
    const u32* d = w.row(I.dst);
    u32 field = (width == 32 ? ~0u : (1u << width) - 1) << at;
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = (d[l] & ~field) | (u32(f(l)) << at & field);
    commit(w, I, I.dst, r);
}
static u32 source_shift(const Ins& I, u32 width) {  // which part of source 0, by op_sel or by the SDWA selector
    if (I.flags & F_SDWA) return 0;                 // routed() has moved it down already
    return width == 16 ? (I.opsel & 1) * 16 : (I.opsel & 3) * 8;
}
// Stochastic rounding to 16 bits: the random word's top bits are added below the last place, then the rest is cut off.
OP(V_CVT_SR_BF16_F32) {
    SourceF32 A(w, I, 0);
    Source B(w, I, 1);
    insert(w, I, (I.opsel >> 3 & 1) * 16, 16, [&](int l) {
        u32 x = A.raw(l);
        return (x & 0x7f800000u) == 0x7f800000u ? bf16_bits(A[l]) : (x + (B[l] >> 16)) >> 16;
    });
}
#define READ_FP8(SUFFIX, FORMAT)                                                                   \
    OP(V_CVT_F32_##SUFFIX) {                                                                       \
        Source A(w, I, 0);                                                                         \
        u32 shift = source_shift(I, 8);                                                            \
        alignas(64) u32 r[LANES];                                                                  \
        EACH_LANE r[l] = bits(DECODE[FORMAT][A[l] >> shift & 255]);                                \
        commit_f32(w, I, r);                                                                       \
    }                                                                                              \
    OP(V_CVT_PK_F32_##SUFFIX) {                                                                    \
        Source A(w, I, 0);                                                                         \
        u32 shift = source_shift(I, 16);                                                           \
        u64 r[LANES];                                                                              \
        EACH_LANE {                                                                                \
            u32 x = A[l] >> shift;                                                                 \
            r[l] = u64(bits(DECODE[FORMAT][x & 255])) | u64(bits(DECODE[FORMAT][x >> 8 & 255])) << 32; \
        }                                                                                          \
        Ins plain = I;                                                                             \
        plain.flags &= ~u32(F_SDWA);                                                               \
        commit_64(w, plain, r);                                                                    \
    }                                                                                              \
    OP(V_CVT_PK_##SUFFIX##_F32) {                                                                  \
        SourceF32 A(w, I, 0), B(w, I, 1);                                                          \
        insert(w, I, (I.opsel >> 3 & 1) * 16, 16, [&](int l) {                                     \
            return encode(FORMATS[FORMAT], A[l], w.fp16_ovfl) | encode(FORMATS[FORMAT], B[l], w.fp16_ovfl) << 8; \
        });                                                                                        \
    }                                                                                              \
    OP(V_CVT_SR_##SUFFIX##_F32) {                                                                  \
        SourceF32 A(w, I, 0);                                                                      \
        Source B(w, I, 1);                                                                         \
        insert(w, I, (I.opsel >> 2 & 3) * 8, 8,                                                    \
               [&](int l) { return encode_stochastic(FORMATS[FORMAT], A[l], B[l], w.fp16_ovfl); }); \
    }
READ_FP8(FP8, IS_FP8)
READ_FP8(BF8, IS_BF8)

// ---- with a scale: the exponent byte of a float; reading multiplies by it, writing divides ------------------------------------

enum class Wide { F32, F16, BF16 };
static inline float wide_real(Wide t, u32 x) { return t == Wide::F32 ? real(x) : t == Wide::F16 ? half_real(x & 0xffff) : bf16_real(x & 0xffff); }
static inline u32 wide_bits(const Wave& w, Wide t, float f) {
    return t == Wide::F32 ? bits(f) : t == Wide::F16 ? half_in_mode(w, f, half_bits(f)) : bf16_bits(f);
}
static inline float scale_up(u32 s) { return exponent_scale(s >> 23 & 255); }
static inline float divided(float x, u32 s) {
    u32 e = s >> 23 & 255;
    return e == 255 ? NAN : float(std::ldexp(double(x), 127 - int(e)));
}
static inline bool saturates(const Wave& w, int format) { return format >= IS_FP6 || w.fp16_ovfl; }

// Two values out of 8 or 16 bits of source 0.
static void scaled_read(Wave& w, const Ins& I, int format, Wide to) {
    Source A(w, I, 0), S(w, I, 1);
    bool four = format == IS_FP4;
    u32 shift = source_shift(I, four ? 8 : 16);
    alignas(64) u32 low[LANES], high[LANES];
    EACH_LANE {
        u32 x = A[l] >> shift, a = four ? x & 15 : x & 255, b = four ? x >> 4 & 15 : x >> 8 & 255;
        float s = scale_up(S[l]);
        low[l] = wide_bits(w, to, DECODE[format][a] * s);
        high[l] = wide_bits(w, to, DECODE[format][b] * s);
    }
    if (to == Wide::F32) {
        commit(w, I, I.dst, low);
        commit(w, I, I.dst + 1, high);
    } else {
        EACH_LANE low[l] |= high[l] << 16;
        commit(w, I, I.dst, low);
    }
}
static void scaled_read_one(Wave& w, const Ins& I, int format, Wide to) {
    Source A(w, I, 0), S(w, I, 1);
    u32 shift = source_shift(I, 8);
    auto value = [&](int l) { return wide_bits(w, to, DECODE[format][A[l] >> shift & 255] * scale_up(S[l])); };
    if (to == Wide::F32) insert(w, I, 0, 32, value);
    else insert(w, I, (I.opsel >> 3 & 1) * 16, 16, value);
}
// Two values into 8 or 16 bits of the destination: from two floats, or from one register of two halves.
static void scaled_write(Wave& w, const Ins& I, int format, Wide from) {
    bool four = format == IS_FP4, pair = from != Wide::F32;
    SourceF32 A(w, I, 0), B(w, I, pair ? 0 : 1);
    Source raw(w, I, 0), S(w, I, pair ? 1 : 2);
    u32 width = four ? 8 : 16, at = four ? (I.opsel >> 2 & 3) * 8 : (I.opsel >> 3 & 1) * 16;
    bool sat = saturates(w, format);
    insert(w, I, at, width, [&](int l) {
        float a = pair ? wide_real(from, raw[l]) : A[l], b = pair ? wide_real(from, raw[l] >> 16) : B[l];
        return encode(FORMATS[format], divided(a, S[l]), sat) | encode(FORMATS[format], divided(b, S[l]), sat) << (width / 2);
    });
}
static void scaled_write_stochastic(Wave& w, const Ins& I, int format, Wide from) {
    SourceF32 A(w, I, 0);
    Source raw(w, I, 0), R(w, I, 1), S(w, I, 2);
    bool sat = saturates(w, format);
    insert(w, I, (I.opsel >> 2 & 3) * 8, 8, [&](int l) {
        float a = from == Wide::F32 ? A[l] : wide_real(from, raw[l]);
        return encode_stochastic(FORMATS[format], divided(a, S[l]), R[l], sat);
    });
}
// Thirty-two six-bit values in six registers; a 32-bit value takes a register, 16-bit values share one.
static void scaled_read_32(Wave& w, const Ins& I, int format, Wide to) {
    u32 packed[6][LANES];
    for (int k = 0; k < 6; k++) std::memcpy(packed[k], w.row(I.a + k), sizeof packed[k]);
    Source S(w, I, 1);
    alignas(64) u32 r[32][LANES];
    for (int k = 0; k < 32; k++)
        EACH_LANE {
            int bit = 6 * k;
            u64 pair = u64(packed[bit >> 5][l]) | u64((bit >> 5) < 5 ? packed[(bit >> 5) + 1][l] : 0) << 32;
            r[k][l] = wide_bits(w, to, DECODE[format][pair >> (bit & 31) & 63] * scale_up(S[l]));
        }
    if (to == Wide::F32) {
        for (int k = 0; k < 32; k++) commit(w, I, I.dst + k, r[k]);
    } else {
        for (int k = 0; k < 16; k++) {
            EACH_LANE r[2 * k][l] |= r[2 * k + 1][l] << 16;
            commit(w, I, I.dst + k, r[2 * k]);
        }
    }
}
static void put_six(u32 (*out)[LANES], int l, int k, u32 code) {
    int bit = 6 * k;
    u64 x = u64(code) << (bit & 31);
    out[bit >> 5][l] |= u32(x);
    if ((bit & 31) > 26) out[(bit >> 5) + 1][l] |= u32(x >> 32);
}
static void scaled_write_32(Wave& w, const Ins& I, int format, Wide from, bool two_sources) {
    Source S(w, I, two_sources ? 2 : 1);
    alignas(64) u32 out[6][LANES] = {};
    for (int k = 0; k < 32; k++)
        EACH_LANE {
            u32 raw = two_sources ? w.row((k & 1 ? I.b : I.a) + k / 2)[l] : w.row(I.a + k / 2)[l] >> (16 * (k & 1));
            put_six(out, l, k, encode(FORMATS[format], divided(wide_real(from, raw), S[l]), true));
        }
    for (int k = 0; k < 6; k++) commit(w, I, I.dst + k, out[k]);
}

#define READING(FORMAT)                                                                                     \
    OP(V_CVT_SCALEF32_PK_F32_##FORMAT) { scaled_read(w, I, IS_##FORMAT, Wide::F32); }                       \
    OP(V_CVT_SCALEF32_PK_F16_##FORMAT) { scaled_read(w, I, IS_##FORMAT, Wide::F16); }                       \
    OP(V_CVT_SCALEF32_PK_BF16_##FORMAT) { scaled_read(w, I, IS_##FORMAT, Wide::BF16); }                     \
    OP(V_CVT_SCALEF32_PK_##FORMAT##_F32) { scaled_write(w, I, IS_##FORMAT, Wide::F32); }                    \
    OP(V_CVT_SCALEF32_PK_##FORMAT##_F16) { scaled_write(w, I, IS_##FORMAT, Wide::F16); }                    \
    OP(V_CVT_SCALEF32_PK_##FORMAT##_BF16) { scaled_write(w, I, IS_##FORMAT, Wide::BF16); }
READING(FP8)
READING(BF8)
READING(FP4)
#define SINGLE(FORMAT)                                                                                      \
    OP(V_CVT_SCALEF32_F32_##FORMAT) { scaled_read_one(w, I, IS_##FORMAT, Wide::F32); }                      \
    OP(V_CVT_SCALEF32_F16_##FORMAT) { scaled_read_one(w, I, IS_##FORMAT, Wide::F16); }                      \
    OP(V_CVT_SCALEF32_SR_##FORMAT##_F32) { scaled_write_stochastic(w, I, IS_##FORMAT, Wide::F32); }         \
    OP(V_CVT_SCALEF32_SR_##FORMAT##_F16) { scaled_write_stochastic(w, I, IS_##FORMAT, Wide::F16); }         \
    OP(V_CVT_SCALEF32_SR_##FORMAT##_BF16) { scaled_write_stochastic(w, I, IS_##FORMAT, Wide::BF16); }
SINGLE(FP8)
SINGLE(BF8)
#define SIX(FORMAT)                                                                                         \
    OP(V_CVT_SCALEF32_PK32_F32_##FORMAT) { scaled_read_32(w, I, IS_##FORMAT, Wide::F32); }                  \
    OP(V_CVT_SCALEF32_PK32_F16_##FORMAT) { scaled_read_32(w, I, IS_##FORMAT, Wide::F16); }                  \
    OP(V_CVT_SCALEF32_PK32_BF16_##FORMAT) { scaled_read_32(w, I, IS_##FORMAT, Wide::BF16); }                \
    OP(V_CVT_SCALEF32_PK32_##FORMAT##_F16) { scaled_write_32(w, I, IS_##FORMAT, Wide::F16, false); }        \
    OP(V_CVT_SCALEF32_PK32_##FORMAT##_BF16) { scaled_write_32(w, I, IS_##FORMAT, Wide::BF16, false); }      \
    OP(V_CVT_SCALEF32_2XPK16_##FORMAT##_F32) { scaled_write_32(w, I, IS_##FORMAT, Wide::F32, true); }
SIX(FP6)
SIX(BF6)

}  // namespace gfx950
