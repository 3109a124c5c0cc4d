// VOPC and its VOP3 forms: one bit a lane into a scalar pair; CMPX forms write EXEC too.
#include "numeric.h"

namespace gfx950 {

static void finish(Wave& w, const Ins& I, u64 m, bool to_exec) {
    commit_mask(w, I, I.dst, m);
    if (to_exec) w.set_s64(EXEC, m & w.exec());
}

template <class S, bool... EXTRA>
struct Two {
    S a, b;
    Two(Wave& w, const Ins& I) : a(w, I, 0, EXTRA...), b(w, I, 1, EXTRA...) {}
};
using Words = Two<Source>;
using Shorts = Two<Source16, false>;
using Longs = Two<Source64>;
using Floats = Two<SourceF32>;
using Doubles = Two<SourceF64>;
using Halves = Two<Source16, true>;

#define COMPARISON(NAME, SOURCES, TYPE, GET, TEST)                        \
    static u64 test_##NAME(Wave& w, const Ins& I) {                       \
        SOURCES both(w, I);                                               \
        auto &A = both.a, &B = both.b;                                    \
        alignas(64) u8 hit[LANES];                                        \
        EACH_LANE {                                                       \
            TYPE a = TYPE(GET(A, l)), b = TYPE(GET(B, l));                \
            (void)a;                                                      \
            (void)b;                                                      \
            hit[l] = (TEST);                                              \
        }                                                                 \
        u64 m = 0;                                                        \
        for (int k = 0; k < 8; k++) {                                     \
            u64 eight;                                                    \
            std::memcpy(&eight, hit + 8 * k, 8);                          \
            m |= (eight * 0x0102040810204080ull >> 56) << (8 * k);        \
        }                                                                 \
        return m;                                                         \
    }                                                                     \
    OP(V_CMP_##NAME) { finish(w, I, test_##NAME(w, I), false); }          \
    OP(V_CMPX_##NAME) { finish(w, I, test_##NAME(w, I), true); }

#define INDEX(S, l) S[l]
#define INTEGER_TYPE(SUFFIX, SOURCES, TYPE)                               \
    COMPARISON(F_##SUFFIX, SOURCES, TYPE, INDEX, false)                   \
    COMPARISON(LT_##SUFFIX, SOURCES, TYPE, INDEX, a < b)                  \
    COMPARISON(EQ_##SUFFIX, SOURCES, TYPE, INDEX, a == b)                 \
    COMPARISON(LE_##SUFFIX, SOURCES, TYPE, INDEX, a <= b)                 \
    COMPARISON(GT_##SUFFIX, SOURCES, TYPE, INDEX, a > b)                  \
    COMPARISON(NE_##SUFFIX, SOURCES, TYPE, INDEX, a != b)                 \
    COMPARISON(GE_##SUFFIX, SOURCES, TYPE, INDEX, a >= b)                 \
    COMPARISON(T_##SUFFIX, SOURCES, TYPE, INDEX, true)
#define FLOAT_TYPE(SUFFIX, SOURCES, TYPE, GET)                            \
    COMPARISON(F_##SUFFIX, SOURCES, TYPE, GET, false)                     \
    COMPARISON(LT_##SUFFIX, SOURCES, TYPE, GET, a < b)                    \
    COMPARISON(EQ_##SUFFIX, SOURCES, TYPE, GET, a == b)                   \
    COMPARISON(LE_##SUFFIX, SOURCES, TYPE, GET, a <= b)                   \
    COMPARISON(GT_##SUFFIX, SOURCES, TYPE, GET, a > b)                    \
    COMPARISON(LG_##SUFFIX, SOURCES, TYPE, GET, a < b || a > b)           \
    COMPARISON(GE_##SUFFIX, SOURCES, TYPE, GET, a >= b)                   \
    COMPARISON(O_##SUFFIX, SOURCES, TYPE, GET, a == a && b == b)          \
    COMPARISON(U_##SUFFIX, SOURCES, TYPE, GET, a != a || b != b)          \
    COMPARISON(NGE_##SUFFIX, SOURCES, TYPE, GET, !(a >= b))               \
    COMPARISON(NLG_##SUFFIX, SOURCES, TYPE, GET, !(a < b || a > b))       \
    COMPARISON(NGT_##SUFFIX, SOURCES, TYPE, GET, !(a > b))                \
    COMPARISON(NLE_##SUFFIX, SOURCES, TYPE, GET, !(a <= b))               \
    COMPARISON(NEQ_##SUFFIX, SOURCES, TYPE, GET, !(a == b))               \
    COMPARISON(NLT_##SUFFIX, SOURCES, TYPE, GET, !(a < b))                \
    COMPARISON(TRU_##SUFFIX, SOURCES, TYPE, GET, true)

#define HALF_AT(S, l) half_real((w.flush16 && !(S[l] & 0x7c00)) ? S[l] & 0x8000 : S[l])
INTEGER_TYPE(I32, Words, i32)
INTEGER_TYPE(U32, Words, u32)
INTEGER_TYPE(I16, Shorts, i16)
INTEGER_TYPE(U16, Shorts, u16)
INTEGER_TYPE(I64, Longs, i64)
INTEGER_TYPE(U64, Longs, u64)
FLOAT_TYPE(F32, Floats, float, INDEX)
FLOAT_TYPE(F64, Doubles, double, INDEX)
FLOAT_TYPE(F16, Halves, float, HALF_AT)

// Class bits: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
static u32 class_of(bool negative, bool ones, bool zero_exponent, bool zero_mantissa, bool top_mantissa) {
    if (ones && !zero_mantissa) return top_mantissa ? 1 : 0;
    u32 size = ones ? 0 : !zero_exponent ? 1 : !zero_mantissa ? 2 : 3;
    return negative ? 2 + size : 9 - size;
}
template <class F>
static u64 classes(Wave& w, const Ins& I, F f) {
    Source B(w, I, 1);
    u64 m = 0;
    EACH_LANE m |= u64(B[l] >> f(l) & 1) << l;
    return m;
}
static u64 class_f32(Wave& w, const Ins& I) {
    SourceF32 A(w, I, 0);
    return classes(w, I, [&](int l) {
        u32 x = A.raw(l), e = x >> 23 & 255, m = x & 0x7fffff;
        return class_of(x >> 31, e == 255, !e, !m, m >> 22);
    });
}
static u64 class_f16(Wave& w, const Ins& I) {
    Source16 A(w, I, 0, true);
    return classes(w, I, [&](int l) {
        u32 x = A[l], e = x >> 10 & 31, m = x & 1023;
        return class_of(x >> 15, e == 31, !e, !m, m >> 9);
    });
}
static u64 class_f64(Wave& w, const Ins& I) {
    SourceF64 A(w, I, 0);
    return classes(w, I, [&](int l) {
        u64 x = A.raw(l), e = x >> 52 & 2047, m = x << 12;
        return class_of(x >> 63, e == 2047, !e, !m, m >> 63);
    });
}
OP(V_CMP_CLASS_F32) { finish(w, I, class_f32(w, I), false); }
OP(V_CMPX_CLASS_F32) { finish(w, I, class_f32(w, I), true); }
OP(V_CMP_CLASS_F16) { finish(w, I, class_f16(w, I), false); }
OP(V_CMPX_CLASS_F16) { finish(w, I, class_f16(w, I), true); }
OP(V_CMP_CLASS_F64) { finish(w, I, class_f64(w, I), false); }
OP(V_CMPX_CLASS_F64) { finish(w, I, class_f64(w, I), true); }

}  // namespace gfx950
