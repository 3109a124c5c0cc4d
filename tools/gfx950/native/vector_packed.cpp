// VOP3P: two floats, two halves or two shorts at a time, and the dot products.
#include <algorithm>

#include "numeric.h"

namespace gfx950 {

// ---- pairs of 32-bit floats: op_sel / op_sel_hi choose the register of the pair that feeds each half ---------------------

struct PairSource {
    Source low, high;
    const u32* feed[2];
    u32 flip[2];
    PairSource(Wave& w, const Ins& I, int k)
        : low(w, operand(I, k)), high(w, paired(I, k) ? operand(I, k) + 1 : operand(I, k)) {
        feed[0] = (I.opsel >> k & 1) ? high.p : low.p;
        feed[1] = (I.opsel_hi >> k & 1) ? high.p : low.p;
        flip[0] = (I.neg >> k & 1) << 31;
        flip[1] = (I.neg_hi >> k & 1) << 31;
    }
    // A constant feeds both halves; a scalar register is a pair like a vector register.
    static bool paired(const Ins& I, int k) { return operand(I, k) >= VECTOR || operand(I, k) < 128; }
    float get(int half, int l) const { return real(feed[half][l] ^ flip[half]); }
};

#define PAIR(NAME, SOURCES, VALUE)                              \
    OP(NAME) {                                                  \
        SOURCES;                                                \
        alignas(64) u32 r[2][LANES];                            \
        for (int h = 0; h < 2; h++) {                           \
            EACH_LANE r[h][l] = bits(VALUE);                    \
            if (I.clamp | i32(w.flush32)) output_modifiers(w, I, r[h]); \
        }                                                       \
        commit(w, I, I.dst, r[0]);                              \
        commit(w, I, I.dst + 1, r[1]);                          \
    }
#define TWO PairSource A(w, I, 0), B(w, I, 1)
#define THREE PairSource A(w, I, 0), B(w, I, 1), C(w, I, 2)
PAIR(V_PK_ADD_F32, TWO, A.get(h, l) + B.get(h, l))
PAIR(V_PK_MUL_F32, TWO, A.get(h, l) * B.get(h, l))
PAIR(V_PK_FMA_F32, THREE, __builtin_fmaf(A.get(h, l), B.get(h, l), C.get(h, l)))
OP(V_PK_MOV_B32) {
    PairSource A(w, I, 0), B(w, I, 1);
    alignas(64) u32 r[2][LANES];
    std::memcpy(r[0], A.feed[0], sizeof r[0]);
    std::memcpy(r[1], (I.opsel >> 1 & 1) ? B.high.p : B.low.p, sizeof r[1]);
    commit(w, I, I.dst, r[0]);
    commit(w, I, I.dst + 1, r[1]);
}

// ---- pairs of 16-bit values ------------------------------------------------------------------------------------------------

struct ShortPair {
    Source full;
    u32 shift[2], flip[2];
    ShortPair(Wave& w, const Ins& I, int k, bool is_float) : full(w, operand(I, k)) {
        shift[0] = (I.opsel >> k & 1) * 16;
        shift[1] = (I.opsel_hi >> k & 1) * 16;
        flip[0] = is_float && (I.neg >> k & 1) ? 0x8000 : 0;
        flip[1] = is_float && (I.neg_hi >> k & 1) ? 0x8000 : 0;
    }
    u32 get(int half, int l) const { return (full[l] >> shift[half] & 0xffff) ^ flip[half]; }
};
#define SHORTS(NAME, COUNT, VALUE)                                                   \
    OP(NAME) {                                                                       \
        ShortPair A(w, I, 0, false), B(w, I, 1, false), C(w, I, COUNT > 2 ? 2 : 0, false); \
        alignas(64) u32 r[LANES];                                                    \
        EACH_LANE {                                                                  \
            u32 out[2];                                                              \
            for (int h = 0; h < 2; h++) {                                            \
                u32 a = A.get(h, l), b = B.get(h, l), c = C.get(h, l);               \
                (void)c;                                                             \
                out[h] = u32(VALUE) & 0xffff;                                        \
            }                                                                        \
            r[l] = out[0] | out[1] << 16;                                            \
        }                                                                            \
        commit(w, I, r);                                                             \
    }
static inline i32 clip_signed(i32 x) { return std::clamp(x, -32768, 32767); }
static inline u32 clip_unsigned(i64 x) { return u32(std::clamp<i64>(x, 0, 65535)); }
SHORTS(V_PK_ADD_U16, 2, I.clamp ? clip_unsigned(i64(a) + b) : a + b)
SHORTS(V_PK_SUB_U16, 2, I.clamp ? clip_unsigned(i64(a) - b) : a - b)
SHORTS(V_PK_ADD_I16, 2, I.clamp ? u32(clip_signed(i16(a) + i16(b))) : a + b)
SHORTS(V_PK_SUB_I16, 2, I.clamp ? u32(clip_signed(i16(a) - i16(b))) : a - b)
SHORTS(V_PK_MUL_LO_U16, 2, a * b)
SHORTS(V_PK_MAD_U16, 3, I.clamp ? clip_unsigned(i64(a) * b + c) : a * b + c)
SHORTS(V_PK_MAD_I16, 3, I.clamp ? u32(clip_signed(i16(a) * i16(b) + i16(c))) : a * b + c)
SHORTS(V_PK_LSHLREV_B16, 2, b << (a & 15))
SHORTS(V_PK_LSHRREV_B16, 2, b >> (a & 15))
SHORTS(V_PK_ASHRREV_I16, 2, i16(b) >> (a & 15))
SHORTS(V_PK_MAX_I16, 2, i16(a) > i16(b) ? a : b)
SHORTS(V_PK_MIN_I16, 2, i16(a) < i16(b) ? a : b)
SHORTS(V_PK_MAX_U16, 2, a > b ? a : b)
SHORTS(V_PK_MIN_U16, 2, a < b ? a : b)

static inline u32 half_out(const Wave& w, const Ins& I, double x) {
    if (I.clamp) x = x > 1 ? 1 : x > 0 ? x : 0;
    return half_in_mode(w, x, half_result(x));
}
static inline double value(const Wave& w, u32 h) { return w.flush16 && !(h & 0x7c00) ? 0.0 : double(half_real(h)); }
#define HALVES(NAME, COUNT, VALUE)                                                       \
    OP(NAME) {                                                                           \
        ShortPair A(w, I, 0, true), B(w, I, 1, true), C(w, I, COUNT > 2 ? 2 : 0, true);  \
        alignas(64) u32 r[LANES];                                                        \
        EACH_LANE {                                                                      \
            u32 out[2];                                                                  \
            for (int h = 0; h < 2; h++) {                                                \
                double a = value(w, A.get(h, l)), b = value(w, B.get(h, l)), c = value(w, C.get(h, l)); \
                (void)c;                                                                 \
                out[h] = half_out(w, I, (VALUE));                                        \
            }                                                                            \
            r[l] = out[0] | out[1] << 16;                                                \
        }                                                                                \
        commit(w, I, r);                                                                 \
    }
static inline double larger(double a, double b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : std::max(a, b); }
static inline double smaller(double a, double b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : std::min(a, b); }
static inline double maximum3(double a, double b, double c) { return (a != a || b != b || c != c) ? NAN : larger(larger(a, b), c); }
static inline double minimum3(double a, double b, double c) { return (a != a || b != b || c != c) ? NAN : smaller(smaller(a, b), c); }
HALVES(V_PK_ADD_F16, 2, a + b)
HALVES(V_PK_MUL_F16, 2, a * b)
HALVES(V_PK_MAX_F16, 2, larger(a, b))
HALVES(V_PK_MIN_F16, 2, smaller(a, b))
HALVES(V_PK_FMA_F16, 3, std::fma(a, b, c))
OP(V_PK_FMAC_F16) {
    Source A(w, I, 0), B(w, I, 1);
    const u32* d = w.row(I.dst);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        r[l] = 0;
        for (int h = 0; h < 32; h += 16)
            r[l] |= half_out(w, I, std::fma(value(w, A[l] >> h & 0xffff), value(w, B[l] >> h & 0xffff), value(w, d[l] >> h & 0xffff))) << h;
    }
    commit(w, I, r);
}
HALVES(V_PK_MAXIMUM3_F16, 3, maximum3(a, b, c))
HALVES(V_PK_MINIMUM3_F16, 3, minimum3(a, b, c))

// ---- dot products ----------------------------------------------------------------------------------------------------------

#define DOT2(NAME, CONVERT)                                                                      \
    OP(NAME) {                                                                                   \
        ShortPair A(w, I, 0, true), B(w, I, 1, true);                                            \
        SourceF32 C(w, I, 2);                                                                    \
        alignas(64) u32 r[LANES];                                                                \
        EACH_LANE {                                                                              \
            float sum = C[l];                                                                    \
            for (int h = 0; h < 2; h++) sum = __builtin_fmaf(CONVERT(A.get(h, l)), CONVERT(B.get(h, l)), sum); \
            r[l] = bits(sum);                                                                    \
        }                                                                                        \
        commit_f32(w, I, r);                                                                     \
    }
DOT2(V_DOT2_F32_F16, half_real)
DOT2(V_DOT2_F32_BF16, bf16_real)
#define DOT2C(NAME, CONVERT)                                                                     \
    OP(NAME) {                                                                                   \
        Source A(w, I, 0), B(w, I, 1);                                                           \
        const u32* d = w.row(I.dst);                                                             \
        alignas(64) u32 r[LANES];                                                                \
        EACH_LANE {                                                                              \
            float sum = real(d[l]);                                                              \
            for (int h = 0; h < 32; h += 16)                                                     \
                sum = __builtin_fmaf(CONVERT(A[l] >> h & 0xffff), CONVERT(B[l] >> h & 0xffff), sum); \
            r[l] = bits(sum);                                                                    \
        }                                                                                        \
        commit_f32(w, I, r);                                                                     \
    }
DOT2C(V_DOT2C_F32_F16, half_real)
DOT2C(V_DOT2C_F32_BF16, bf16_real)

static i64 dot(u32 a, u32 b, int width, bool is_signed) {
    i64 sum = 0;
    for (int k = 0; k < 32; k += width) {
        u32 x = a << (32 - width - k), y = b << (32 - width - k);
        sum += is_signed ? i64(i32(x) >> (32 - width)) * (i32(y) >> (32 - width)) : i64(u64(x >> (32 - width)) * (y >> (32 - width)));
    }
    return sum;
}
#define DOT_INTEGER(NAME, WIDTH, SIGNED)                                                         \
    OP(NAME) {                                                                                   \
        Source A(w, I, 0), B(w, I, 1), C(w, I, 2);                                               \
        alignas(64) u32 r[LANES];                                                                \
        EACH_LANE {                                                                              \
            i64 sum = dot(A[l], B[l], WIDTH, SIGNED) + (SIGNED ? i64(i32(C[l])) : i64(C[l]));    \
            if (I.clamp) sum = SIGNED ? std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : std::min<i64>(sum, UINT32_MAX); \
            r[l] = u32(sum);                                                                     \
        }                                                                                        \
        commit(w, I, r);                                                                         \
    }
#define DOT_ACCUMULATE(NAME, WIDTH)                                                              \
    OP(NAME) {                                                                                   \
        Source A(w, I, 0), B(w, I, 1);                                                           \
        const u32* d = w.row(I.dst);                                                             \
        alignas(64) u32 r[LANES];                                                                \
        EACH_LANE {                                                                              \
            i64 sum = dot(A[l], B[l], WIDTH, true) + i32(d[l]);                                  \
            if (I.clamp) sum = std::clamp<i64>(sum, INT32_MIN, INT32_MAX);                       \
            r[l] = u32(sum);                                                                     \
        }                                                                                        \
        commit(w, I, r);                                                                         \
    }
DOT_ACCUMULATE(V_DOT2C_I32_I16, 16)
DOT_ACCUMULATE(V_DOT4C_I32_I8, 8)
DOT_ACCUMULATE(V_DOT8C_I32_I4, 4)
DOT_INTEGER(V_DOT2_I32_I16, 16, true)
DOT_INTEGER(V_DOT2_U32_U16, 16, false)
DOT_INTEGER(V_DOT4_I32_I8, 8, true)
DOT_INTEGER(V_DOT4_U32_U8, 8, false)
DOT_INTEGER(V_DOT8_I32_I4, 4, true)
DOT_INTEGER(V_DOT8_U32_U4, 4, false)

}  // namespace gfx950
