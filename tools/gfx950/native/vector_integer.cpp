// Integer, logical and bit-field vector operations.
#include "core.h"

namespace gfx950 {

#define MAP1(NAME, VALUE)                          \
    OP(NAME) {                                     \
        Source A(w, I, 0);                         \
        alignas(64) u32 r[LANES];                  \
        EACH_LANE {                                \
            u32 a = A[l];                          \
            r[l] = (VALUE);                        \
        }                                          \
        commit(w, I, r);                           \
    }
#define MAP2(NAME, VALUE)                          \
    OP(NAME) {                                     \
        Source A(w, I, 0), B(w, I, 1);             \
        alignas(64) u32 r[LANES];                  \
        EACH_LANE {                                \
            u32 a = A[l], b = B[l];                \
            r[l] = (VALUE);                        \
        }                                          \
        commit(w, I, r);                           \
    }
#define MAP3(NAME, VALUE)                          \
    OP(NAME) {                                     \
        Source A(w, I, 0), B(w, I, 1), C(w, I, 2); \
        alignas(64) u32 r[LANES];                  \
        EACH_LANE {                                \
            u32 a = A[l], b = B[l], c = C[l];      \
            r[l] = (VALUE);                        \
        }                                          \
        commit(w, I, r);                           \
    }

static inline u32 saturated(u64 x) { return x >> 32 ? ~0u : u32(x); }
static inline u32 saturated_signed(i64 x) { return u32(x > INT32_MAX ? i64(INT32_MAX) : x < INT32_MIN ? i64(INT32_MIN) : x); }
static inline i32 s24(u32 x) { return i32(x << 8) >> 8; }
static inline u32 reversed(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}

MAP1(V_MOV_B32, a)
MAP1(V_NOT_B32, ~a)
MAP1(V_BFREV_B32, reversed(a))
MAP1(V_FFBH_U32, a ? u32(__builtin_clz(a)) : ~0u)
MAP1(V_FFBL_B32, a ? u32(__builtin_ctz(a)) : ~0u)
MAP1(V_FFBH_I32, (i32(a) < 0 ? ~a : a) ? u32(__builtin_clz(i32(a) < 0 ? ~a : a)) : ~0u)
MAP1(V_PRNG_B32, (a << 1) ^ (a >> 31 ? 197u : 0u))
OP(V_NOP) {}
OP(V_CLREXCP) {}

MAP2(V_AND_B32, a & b)
MAP2(V_OR_B32, a | b)
MAP2(V_XOR_B32, a ^ b)
MAP2(V_XNOR_B32, ~(a ^ b))
MAP2(V_LSHLREV_B32, b << (a & 31))
MAP2(V_LSHRREV_B32, b >> (a & 31))
MAP2(V_ASHRREV_I32, u32(i32(b) >> (a & 31)))
MAP2(V_MUL_LO_U32, a * b)
MAP2(V_MUL_HI_U32, u32(u64(a) * b >> 32))
MAP2(V_MUL_HI_I32, u32(i64(i32(a)) * i32(b) >> 32))
MAP2(V_MUL_U32_U24, (a & 0xffffff) * (b & 0xffffff))
MAP2(V_MUL_HI_U32_U24, u32(u64(a & 0xffffff) * (b & 0xffffff) >> 32))
MAP2(V_MUL_I32_I24, u32(i64(s24(a)) * s24(b)))
MAP2(V_MUL_HI_I32_I24, u32(i64(s24(a)) * s24(b) >> 32))
MAP2(V_MIN_U32, a < b ? a : b)
MAP2(V_MAX_U32, a > b ? a : b)
MAP2(V_MIN_I32, i32(a) < i32(b) ? a : b)
MAP2(V_MAX_I32, i32(a) > i32(b) ? a : b)
MAP2(V_BCNT_U32_B32, u32(__builtin_popcount(a)) + b)
MAP2(V_BFM_B32, ((1u << (a & 31)) - 1) << (b & 31))
MAP2(V_CVT_PK_U16_U32, (a > 0xffff ? 0xffff : a) | (b > 0xffff ? 0xffff : b) << 16)
static inline u32 clip16(u32 x) { return u32(u16(i32(x) > 32767 ? 32767 : i32(x) < -32768 ? -32768 : i32(x))); }
MAP2(V_CVT_PK_I16_I32, clip16(a) | clip16(b) << 16)

// Additions can saturate (the clamp bit).
#define ADDING(NAME, EXACT, SATURATE, TYPE)                             \
    OP(NAME) {                                                          \
        Source A(w, I, 0), B(w, I, 1);                                  \
        alignas(64) u32 r[LANES];                                       \
        if (I.clamp) {                                                  \
            EACH_LANE { TYPE a = A[l], b = B[l]; r[l] = SATURATE; }     \
        } else {                                                        \
            EACH_LANE { u32 a = A[l], b = B[l]; r[l] = EXACT; }         \
        }                                                               \
        commit(w, I, r);                                                \
    }
ADDING(V_ADD_U32, a + b, saturated(a + b), u64)
ADDING(V_SUB_U32, a - b, (a < b ? 0 : u32(a - b)), u64)
ADDING(V_SUBREV_U32, b - a, (b < a ? 0 : u32(b - a)), u64)
ADDING(V_ADD_I32, a + b, saturated_signed(i64(i32(a)) + i64(i32(b))), u32)
ADDING(V_SUB_I32, a - b, saturated_signed(i64(i32(a)) - i64(i32(b))), u32)

static inline u32 sum(const Ins& I, u64 x) { return I.clamp ? saturated(x) : u32(x); }
static inline u32 sum_signed(const Ins& I, i64 x) { return I.clamp ? saturated_signed(x) : u32(x); }
MAP3(V_MAD_U32_U24, sum(I, u64(a & 0xffffff) * (b & 0xffffff) + c))
MAP3(V_MAD_I32_I24, sum_signed(I, i64(s24(a)) * s24(b) + i32(c)))
MAP3(V_LSHL_OR_B32, a << (b & 31) | c)
MAP3(V_LSHL_ADD_U32, (a << (b & 31)) + c)
MAP3(V_ADD_LSHL_U32, (a + b) << (c & 31))
MAP3(V_AND_OR_B32, (a & b) | c)
MAP3(V_OR3_B32, a | b | c)
MAP3(V_ADD3_U32, a + b + c)
MAP3(V_XAD_U32, (a ^ b) + c)
MAP3(V_BFI_B32, (a & b) | (~a & c))
MAP3(V_BFE_U32, (c & 31) ? a >> (b & 31) & ((1u << (c & 31)) - 1) : 0)
MAP3(V_BFE_I32, (c & 31) ? u32(i32(u32(i32(a) >> (b & 31)) << (32 - (c & 31))) >> (32 - (c & 31))) : 0)
MAP3(V_ALIGNBIT_B32, u32((u64(a) << 32 | b) >> (c & 31)))
MAP3(V_ALIGNBYTE_B32, u32((u64(a) << 32 | b) >> (8 * (c & 3))))
static inline u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 max_u(u32 a, u32 b) { return a > b ? a : b; }
static inline u32 min_i(u32 a, u32 b) { return i32(a) < i32(b) ? a : b; }
static inline u32 max_i(u32 a, u32 b) { return i32(a) > i32(b) ? a : b; }
MAP3(V_MIN3_U32, min_u(min_u(a, b), c))
MAP3(V_MAX3_U32, max_u(max_u(a, b), c))
MAP3(V_MED3_U32, max_u(min_u(a, b), min_u(max_u(a, b), c)))
MAP3(V_MIN3_I32, min_i(min_i(a, b), c))
MAP3(V_MAX3_I32, max_i(max_i(a, b), c))
MAP3(V_MED3_I32, max_i(min_i(a, b), min_i(max_i(a, b), c)))
static inline u32 bytes_apart(u32 a, u32 b, u32 skip_zero) {
    u32 sum = 0;
    for (int k = 0; k < 32; k += 8) {
        i32 x = i32(a >> k & 255), y = i32(b >> k & 255);
        if (!(skip_zero && !y)) sum += u32(x > y ? x - y : y - x);
    }
    return sum;
}
MAP3(V_SAD_U8, sum(I, u64(bytes_apart(a, b, 0)) + c))
MAP3(V_MSAD_U8, sum(I, u64(bytes_apart(a, b, 1)) + c))
MAP3(V_SAD_HI_U8, sum(I, (u64(bytes_apart(a, b, 0)) << 16) + c))
MAP3(V_SAD_U32, sum(I, u64(a > b ? a - b : b - a) + c))
static inline u32 clip8(i32 x, i32 low, i32 high) { return u32(x < low ? low : x > high ? high : x) & 255; }
static inline u32 pick_byte(u64 data, u32 sel) {
    if (sel < 8) return u32(data >> (8 * sel)) & 255;
    if (sel < 12) return (data >> (16 * (sel - 8) + 15) & 1) ? 255 : 0;
    return sel == 12 ? 0 : 255;
}
static inline u32 permuted(u32 a, u32 b, u32 c) {
    u64 d = u64(a) << 32 | b;
    return pick_byte(d, c & 255) | pick_byte(d, c >> 8 & 255) << 8 | pick_byte(d, c >> 16 & 255) << 16 | pick_byte(d, c >> 24) << 24;
}
MAP3(V_PERM_B32, permuted(a, b, c))

// The truth table: bit 4a+2b+c of it is the result for the bits a, b, c.
OP(V_BITOP3_B32) {
    Source A(w, I, 0), B(w, I, 1), C(w, I, 2);
    alignas(64) u32 r[LANES];
    u32 on[8];
    for (int k = 0; k < 8; k++) on[k] = 0u - (u32(I.imm) >> k & 1);
    EACH_LANE {
        u32 a = A[l], b = B[l], c = C[l];
        u32 low = (~c & ((~b & on[0]) | (b & on[2]))) | (c & ((~b & on[1]) | (b & on[3])));
        u32 high = (~c & ((~b & on[4]) | (b & on[6]))) | (c & ((~b & on[5]) | (b & on[7])));
        r[l] = (~a & low) | (a & high);
    }
    commit(w, I, r);
}

// ---- 16 bits ---------------------------------------------------------------------------------------------------------

#define HALF2(NAME, VALUE)                                            \
    OP(NAME) {                                                        \
        Source16 A(w, I, 0, false), B(w, I, 1, false);                \
        alignas(64) u32 r[LANES];                                     \
        EACH_LANE {                                                   \
            u32 a = A[l], b = B[l];                                   \
            (void)a;                                                  \
            r[l] = u32(VALUE);                                        \
        }                                                             \
        commit_16(w, I, r);                                           \
    }
#define HALF3(NAME, VALUE)                                                             \
    OP(NAME) {                                                                         \
        Source16 A(w, I, 0, false), B(w, I, 1, false), C(w, I, 2, false);              \
        alignas(64) u32 r[LANES];                                                      \
        EACH_LANE {                                                                    \
            u32 a = A[l], b = B[l], c = C[l];                                          \
            r[l] = u32(VALUE);                                                         \
        }                                                                              \
        commit_16(w, I, r);                                                            \
    }
static inline i32 clip_i16(i32 x) { return x > 32767 ? 32767 : x < -32768 ? -32768 : x; }
HALF2(V_ADD_U16, I.clamp && a + b > 0xffff ? 0xffff : a + b)
HALF2(V_SUB_U16, I.clamp && a < b ? 0 : a - b)
HALF2(V_SUBREV_U16, I.clamp && b < a ? 0 : b - a)
HALF2(V_ADD_I16, I.clamp ? clip_i16(i16(a) + i16(b)) : i32(a + b))
HALF2(V_SUB_I16, I.clamp ? clip_i16(i16(a) - i16(b)) : i32(a - b))
HALF2(V_MUL_LO_U16, a * b)
HALF2(V_LSHLREV_B16, b << (a & 15))
HALF2(V_LSHRREV_B16, b >> (a & 15))
HALF2(V_ASHRREV_I16, i32(i16(b)) >> (a & 15))
HALF2(V_MAX_U16, a > b ? a : b)
HALF2(V_MIN_U16, a < b ? a : b)
HALF2(V_MAX_I16, i16(a) > i16(b) ? a : b)
HALF2(V_MIN_I16, i16(a) < i16(b) ? a : b)
HALF3(V_MAD_U16, I.clamp && u64(a) * b + c > 0xffff ? 0xffff : a * b + c)
HALF3(V_MAD_I16, I.clamp ? clip_i16(i16(a) * i16(b) + i16(c)) : i16(a) * i16(b) + i16(c))
HALF3(V_MIN3_I16, i16(min_i(min_i(u32(i16(a)), u32(i16(b))), u32(i16(c)))))
HALF3(V_MAX3_I16, i16(max_i(max_i(u32(i16(a)), u32(i16(b))), u32(i16(c)))))
HALF3(V_MED3_I16, max_i(min_i(u32(i16(a)), u32(i16(b))), min_i(max_i(u32(i16(a)), u32(i16(b))), u32(i16(c)))))
HALF3(V_MIN3_U16, min_u(min_u(a, b), c))
HALF3(V_MAX3_U16, max_u(max_u(a, b), c))
HALF3(V_MED3_U16, max_u(min_u(a, b), min_u(max_u(a, b), c)))
OP(V_BITOP3_B16) {
    Source16 A(w, I, 0, false), B(w, I, 1, false), C(w, I, 2, false);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        u32 a = A[l], b = B[l], c = C[l], x = 0;
        for (int k = 0; k < 8; k++)
            if (I.imm >> k & 1) x |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        r[l] = x;
    }
    commit_16(w, I, r);
}
// 16-bit factors with a 32-bit addend.
OP(V_MAD_U32_U16) {
    Source16 A(w, I, 0, false), B(w, I, 1, false);
    Source C(w, I, 2);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = sum(I, u64(A[l]) * B[l] + C[l]);
    commit(w, I, r);
}
OP(V_MAD_I32_I16) {
    Source16 A(w, I, 0, false), B(w, I, 1, false);
    Source C(w, I, 2);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = sum_signed(I, i64(i16(A[l])) * i16(B[l]) + i32(C[l]));
    commit(w, I, r);
}
OP(V_PACK_B32_F16) {
    Source16 A(w, I, 0, true), B(w, I, 1, true);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = A[l] | B[l] << 16;
    commit(w, I, r);
}
static void shift_pack(Wave& w, const Ins& I, i32 low, i32 high) {
    Source A(w, I, 0), B(w, I, 1), C(w, I, 2);
    alignas(64) u32 r[LANES];
    EACH_LANE {
        u32 s = C[l] & 31;
        r[l] = clip8(i32(A[l]) >> s, low, high) | clip8(i32(B[l]) >> s, low, high) << 8;
    }
    commit_16(w, I, r);
}
OP(V_ASHR_PK_I8_I32) { shift_pack(w, I, -128, 127); }
OP(V_ASHR_PK_U8_I32) { shift_pack(w, I, 0, 255); }
OP(V_SAT_PK_U8_I16) {
    Source A(w, I, 0);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = clip8(i16(A[l]), 0, 255) | clip8(i16(A[l] >> 16), 0, 255) << 8;
    commit_16(w, I, r);
}

// ---- carries and 64 bits -----------------------------------------------------------------------------------------------

enum class Sum { Add, Subtract, Reverse };
static void carried(Wave& w, const Ins& I, Sum kind, bool with_carry) {
    Source A(w, I, 0), B(w, I, 1);
    u64 in = with_carry ? w.s64(I.c) : 0, out = 0;
    alignas(64) u32 r[LANES];
    EACH_LANE {
        u64 k = in >> l & 1, a = A[l], b = B[l];
        if (kind == Sum::Reverse) std::swap(a, b);
        if (kind == Sum::Add) {
            u64 t = a + b + k;
            r[l] = (I.clamp && t >> 32) ? ~0u : u32(t);
            out |= (t >> 32) << l;
        } else {
            u64 t = b + k;
            r[l] = (I.clamp && t > a) ? 0 : u32(a - t);
            out |= u64(t > a) << l;
        }
    }
    commit(w, I, r);
    commit_mask(w, I, I.dst2, out);
}
OP(V_ADD_CO_U32) { carried(w, I, Sum::Add, false); }
OP(V_SUB_CO_U32) { carried(w, I, Sum::Subtract, false); }
OP(V_SUBREV_CO_U32) { carried(w, I, Sum::Reverse, false); }
OP(V_ADDC_CO_U32) { carried(w, I, Sum::Add, true); }
OP(V_SUBB_CO_U32) { carried(w, I, Sum::Subtract, true); }
OP(V_SUBBREV_CO_U32) { carried(w, I, Sum::Reverse, true); }

OP(V_MOV_B64) {
    Source64 A(w, I, 0);
    u64 r[LANES];
    EACH_LANE r[l] = A[l];
    commit_64(w, I, r);
}
OP(V_MAD_U64_U32) {
    Source A(w, I, 0), B(w, I, 1);
    Source64 C(w, I, 2);
    u64 r[LANES], carry = 0;
    EACH_LANE {
        u64 c = C[l];
        r[l] = u64(A[l]) * B[l] + c;
        carry |= u64(r[l] < c) << l;
        if (I.clamp && r[l] < c) r[l] = ~u64(0);
    }
    commit_64(w, I, r);
    commit_mask(w, I, I.dst2, carry);
}
OP(V_MAD_I64_I32) {
    Source A(w, I, 0), B(w, I, 1);
    Source64 C(w, I, 2);
    u64 r[LANES], overflow = 0;
    EACH_LANE {
        i64 p = i64(i32(A[l])) * i32(B[l]), sum;
        overflow |= u64(__builtin_add_overflow(p, i64(C[l]), &sum)) << l;
        r[l] = u64(p) + C[l];
        if (I.clamp && (overflow >> l & 1)) r[l] = p < 0 ? u64(1) << 63 : ~u64(0) >> 1;
    }
    commit_64(w, I, r);
    commit_mask(w, I, I.dst2, overflow);
}
OP(V_LSHL_ADD_U64) {
    Source64 A(w, I, 0), C(w, I, 2);
    Source B(w, I, 1);
    u64 r[LANES];
    EACH_LANE r[l] = (A[l] << (B[l] & 7)) + C[l];
    commit_64(w, I, r);
}
#define SHIFT64(NAME, VALUE)              \
    OP(NAME) {                            \
        Source A(w, I, 0);                \
        Source64 B(w, I, 1);              \
        u64 r[LANES];                     \
        EACH_LANE {                       \
            u32 a = A[l] & 63;            \
            u64 b = B[l];                 \
            r[l] = (VALUE);               \
        }                                 \
        commit_64(w, I, r);               \
    }
SHIFT64(V_LSHLREV_B64, b << a)
SHIFT64(V_LSHRREV_B64, b >> a)
SHIFT64(V_ASHRREV_I64, u64(i64(b) >> a))

}  // namespace gfx950
