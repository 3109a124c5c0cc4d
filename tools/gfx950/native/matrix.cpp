// MFMA: D = A * B + C over one wave.
//
// Lane l of a matrix with M rows holds row l % M; the lane group l / M holds a slice of K, or one of several independent
// blocks. Eight-bit operands of the K=128 / K=64 forms hold two runs of 16 per lane group instead of one run of 32.
// The sum runs over K in order in single precision with fused multiply-adds; the hardware's own order inside one
// instruction is not published, so compare results with a tolerance.
#include <algorithm>

#include "numeric.h"

namespace gfx950 {

enum Element { E_FP8 = IS_FP8, E_BF8, E_FP6, E_BF6, E_FP4, E_F32, E_F16, E_BF16 };

struct Shape {
    int m, k, blocks;
    int groups() const { return LANES / m / blocks; }   // lane groups that share one block's K
    int run() const { return k / groups(); }            // values of K in one lane
    int outputs() const { return m * m * blocks / LANES; }
};

template <int TYPE>
static inline float element(const u32* rows, int j, int l) {
    if constexpr (TYPE == E_F32) {
        return real(rows[j * LANES + l]);
    } else if constexpr (TYPE == E_F16) {
        return narrow<5, 10, 15, true, false>(rows[(j >> 1) * LANES + l] >> (16 * (j & 1)));
    } else if constexpr (TYPE == E_BF16) {
        return real((j & 1) ? rows[(j >> 1) * LANES + l] & 0xffff0000u : rows[(j >> 1) * LANES + l] << 16);
    } else if constexpr (TYPE == E_FP8) {
        return narrow<4, 3, 7, false, true>(rows[(j >> 2) * LANES + l] >> (8 * (j & 3)));
    } else if constexpr (TYPE == E_BF8) {
        return narrow<5, 2, 15, true, false>(rows[(j >> 2) * LANES + l] >> (8 * (j & 3)));
    } else if constexpr (TYPE == E_FP4) {
        return narrow<2, 1, 1, false, false>(rows[(j >> 3) * LANES + l] >> (4 * (j & 7)));
    } else {
        int bit = 6 * j;
        u32 x = rows[(bit >> 5) * LANES + l] >> (bit & 31);
        if ((bit & 31) > 26) x |= rows[((bit >> 5) + 1) * LANES + l] << (32 - (bit & 31));
        return TYPE == E_FP6 ? narrow<2, 3, 1, false, false>(x) : narrow<3, 2, 3, false, false>(x);
    }
}

// out[k][i] for one block; the lanes of a group are contiguous, so the inner loop is over them.
template <int TYPE, int M>
static void spread(const u32* rows, const Shape& s, int block, float* out) {
    int run = s.run();
    bool split = (TYPE == E_FP8 || TYPE == E_BF8) && run == 32;
    for (int g = 0; g < s.groups(); g++) {
        int first = (block * s.groups() + g) * M;
        for (int j = 0; j < run; j++) {
            int k = split ? (j >> 4) * (s.k / 2) + g * 16 + (j & 15) : g * run + j;
            float* o = out + k * M;
            for (int i = 0; i < M; i++) o[i] = element<TYPE>(rows, j, first + i);
        }
    }
}
template <int M>
static void spread(const u32* rows, int type, const Shape& s, int block, float* out) {
    switch (type) {
        case E_F32: return spread<E_F32, M>(rows, s, block, out);
        case E_F16: return spread<E_F16, M>(rows, s, block, out);
        case E_BF16: return spread<E_BF16, M>(rows, s, block, out);
        case E_FP8: return spread<E_FP8, M>(rows, s, block, out);
        case E_BF8: return spread<E_BF8, M>(rows, s, block, out);
        case E_FP6: return spread<E_FP6, M>(rows, s, block, out);
        case E_BF6: return spread<E_BF6, M>(rows, s, block, out);
        default: return spread<E_FP4, M>(rows, s, block, out);
    }
}

// Where result v of lane l stands in the block's M x M square.
static inline void place(const Shape& s, int v, int l, int& block, int& row, int& column) {
    column = l % s.m;
    if (s.m == 4) {
        block = l / 4;
        row = v;
        return;
    }
    int per = s.m * s.m / LANES, q = v % per;
    block = v / per;
    row = s.m == 16 ? 4 * (l / 16) + q : 8 * (q / 4) + 4 * (l / 32) + (q & 3);
}
// Calls f(lane, offset in the squares) for every run of M lanes of result v: they are one row.
template <int M, class F>
static inline void each_row(const Shape& s, int v, F f) {
    for (int l = 0; l < LANES; l += M) {
        int block, row, column;
        place(s, v, l, block, row, column);
        f(l, (block * M + row) * M);
    }
}

struct Scales {
    float a[4 * 32], b[4 * 32];  // [K / 32][row]
};

// C += A * B, a tile of 8 x 16 (4 x 4) results at a time, a row of it in one vector; with scales, each slice of 32 along K
// has its own factors. This file is compiled with contraction, so that a product and a sum are one fused operation.
template <int M, bool SCALED>
static void multiply(const float* A, const float* B, const Shape& s, const Scales& scales, float* C) {
    constexpr int W = M < 16 ? M : 16, R = M < 8 ? M : 8;
    typedef float Row __attribute__((vector_size(4 * W), aligned(4)));
    int parts = SCALED ? s.k / 32 : 1, length = s.k / parts;
    for (int j0 = 0; j0 < M; j0 += W)
        for (int i0 = 0; i0 < M; i0 += R) {
            float* c = C + i0 * M + j0;
            for (int p = 0; p < parts; p++) {
                Row sum[R];
                for (int i = 0; i < R; i++) {
                    if (SCALED) sum[i] = Row{};
                    else std::memcpy(&sum[i], c + i * M, sizeof(Row));
                }
                const float *a = A + p * length * M + i0, *b = B + p * length * M + j0;
                for (int k = 0; k < length; k++, a += M, b += M) {
                    Row row;
                    std::memcpy(&row, b, sizeof row);
                    for (int i = 0; i < R; i++) sum[i] = row * a[i] + sum[i];
                }
                for (int i = 0; i < R; i++) {
                    if (SCALED)
                        for (int j = 0; j < W; j++)
                            c[i * M + j] = float(double(sum[i][j]) * scales.a[p * M + i0 + i] * scales.b[p * M + j0 + j] + c[i * M + j]);
                    else
                        std::memcpy(c + i * M, &sum[i], sizeof(Row));
                }
            }
        }
}

template <int M>
static void matrix_of(Wave& w, const Ins& I, const Shape& s, int type_a, int type_b, bool scaled) {
    alignas(64) static thread_local float A[32 * 128], B[32 * 128];
    alignas(64) float C[32 * 32 * 2];
    for (int v = 0; v < s.outputs(); v++) {
        if (I.c >= VECTOR) {
            const u32* c = w.row(I.c + v);
            each_row<M>(s, v, [&](int l, int at) { std::memcpy(C + at, c + l, 4 * M); });
        } else {
            each_row<M>(s, v, [&](int, int at) { std::fill(C + at, C + at + M, real(w.s[I.c])); });
        }
    }
    Scales scales;
    if (scaled)
        for (int side = 0; side < 2; side++) {
            Source e(w, side ? I.imm : I.dst2);
            int byte = (side ? I.imm2 >> 2 : I.imm2) & 3;
            EACH_LANE {
                u32 x = e[l] >> (8 * byte) & 255;  // 2^(x - 127); a denormal for 0, NaN for 255
                (side ? scales.b : scales.a)[l] = x == 255 ? NAN : real(x ? x << 23 : 1u << 22);
            }
        }
    for (int b = 0; b < s.blocks; b++) {
        spread<M>(w.row(I.a), type_a, s, b, A);
        spread<M>(w.row(I.b), type_b, s, b, B);
        if (scaled) multiply<M, true>(A, B, s, scales, C + b * M * M);
        else multiply<M, false>(A, B, s, scales, C + b * M * M);
    }
    for (int v = 0; v < s.outputs(); v++) {
        u32* d = w.row(I.dst + v);
        each_row<M>(s, v, [&](int l, int at) { std::memcpy(d + l, C + at, 4 * M); });
    }
}
static void matrix(Wave& w, const Ins& I, const Shape& s, int type_a, int type_b, bool scaled = false) {
    if (I.a < VECTOR || I.b < VECTOR) w.fail("unsupported", "a scalar A or B operand of MFMA");
    if (s.m == 16) matrix_of<16>(w, I, s, type_a, type_b, scaled);
    else if (s.m == 32) matrix_of<32>(w, I, s, type_a, type_b, scaled);
    else matrix_of<4>(w, I, s, type_a, type_b, scaled);
}

// Integers are exact, so they go through 32-bit sums of their own.
static void matrix_i8(Wave& w, const Ins& I, const Shape& s) {
    if (I.a < VECTOR || I.b < VECTOR) w.fail("unsupported", "a scalar A or B operand of MFMA");
    const u32 *ra = w.row(I.a), *rb = w.row(I.b);
    u32 out[32][LANES];
    int run = s.run(), groups = s.groups(), block, row, column;
    for (int v = 0; v < s.outputs(); v++)
        EACH_LANE {
            place(s, v, l, block, row, column);
            u32 sum = I.c >= VECTOR ? w.row(I.c + v)[l] : w.s[I.c];
            for (int g = 0; g < groups; g++) {
                int first = (block * groups + g) * s.m;
                for (int j = 0; j < run; j++)
                    sum += u32(i32(i8(ra[(j >> 2) * LANES + first + row] >> (8 * (j & 3)))) *
                               i32(i8(rb[(j >> 2) * LANES + first + column] >> (8 * (j & 3)))));
            }
            out[v][l] = sum;
        }
    for (int v = 0; v < s.outputs(); v++) std::memcpy(w.row(I.dst + v), out[v], sizeof out[v]);
}

// Doubles: one value a lane; result v of lane l is row 4 * v + l / 16.
OP(V_MFMA_F64_16X16X4_F64) {
    Source64 A(w, I.a), B(w, I.b);
    u64 out[4][LANES];
    for (int v = 0; v < 4; v++) {
        Source64 C(w, I.c >= VECTOR ? I.c + 2 * v : I.c);
        EACH_LANE {
            int row = 4 * v + l / 16, column = l % 16;
            double sum = real64(C[l]);
            for (int k = 0; k < 4; k++) sum = std::fma(real64(A[16 * k + row]), real64(B[16 * k + column]), sum);
            out[v][l] = bits64(sum);
        }
    }
    for (int v = 0; v < 4; v++)
        EACH_LANE {
            w.row(I.dst + 2 * v)[l] = u32(out[v][l]);
            w.row(I.dst + 2 * v + 1)[l] = u32(out[v][l] >> 32);
        }
}

#define MFMA(NAME, M, K, BLOCKS, A, B) \
    OP(NAME) { matrix(w, I, Shape{M, K, BLOCKS}, A, B); }
#define FAMILY16(TYPE, E)                                      \
    MFMA(V_MFMA_F32_32X32X4_2B_##TYPE, 32, 4, 2, E, E)         \
    MFMA(V_MFMA_F32_16X16X4_4B_##TYPE, 16, 4, 4, E, E)         \
    MFMA(V_MFMA_F32_4X4X4_16B_##TYPE, 4, 4, 16, E, E)          \
    MFMA(V_MFMA_F32_32X32X8_##TYPE, 32, 8, 1, E, E)            \
    MFMA(V_MFMA_F32_16X16X16_##TYPE, 16, 16, 1, E, E)          \
    MFMA(V_MFMA_F32_16X16X32_##TYPE, 16, 32, 1, E, E)          \
    MFMA(V_MFMA_F32_32X32X16_##TYPE, 32, 16, 1, E, E)
FAMILY16(F16, E_F16)
FAMILY16(BF16, E_BF16)
MFMA(V_MFMA_F32_32X32X1_2B_F32, 32, 1, 2, E_F32, E_F32)
MFMA(V_MFMA_F32_16X16X1_4B_F32, 16, 1, 4, E_F32, E_F32)
MFMA(V_MFMA_F32_4X4X1_16B_F32, 4, 1, 16, E_F32, E_F32)
MFMA(V_MFMA_F32_32X32X2_F32, 32, 2, 1, E_F32, E_F32)
MFMA(V_MFMA_F32_16X16X4_F32, 16, 4, 1, E_F32, E_F32)
#define FAMILY8(A, B)                                                                  \
    MFMA(V_MFMA_F32_16X16X32_##A##_##B, 16, 32, 1, E_##A, E_##B)                       \
    MFMA(V_MFMA_F32_32X32X16_##A##_##B, 32, 16, 1, E_##A, E_##B)
FAMILY8(FP8, FP8)
FAMILY8(FP8, BF8)
FAMILY8(BF8, FP8)
FAMILY8(BF8, BF8)
#define INTEGER(NAME, M, K, BLOCKS) \
    OP(NAME) { matrix_i8(w, I, Shape{M, K, BLOCKS}); }
INTEGER(V_MFMA_I32_32X32X4_2B_I8, 32, 4, 2)
INTEGER(V_MFMA_I32_16X16X4_4B_I8, 16, 4, 4)
INTEGER(V_MFMA_I32_4X4X4_16B_I8, 4, 4, 16)
INTEGER(V_MFMA_I32_32X32X16_I8, 32, 16, 1)
INTEGER(V_MFMA_I32_16X16X32_I8, 16, 32, 1)
INTEGER(V_MFMA_I32_16X16X64_I8, 16, 64, 1)
INTEGER(V_MFMA_I32_32X32X32_I8, 32, 32, 1)
OP(V_MFMA_F32_16X16X128_F8F6F4) { matrix(w, I, Shape{16, 128, 1}, I.x0, I.x1); }
OP(V_MFMA_F32_32X32X64_F8F6F4) { matrix(w, I, Shape{32, 64, 1}, I.x0, I.x1); }
OP(V_MFMA_SCALE_F32_16X16X128_F8F6F4) { matrix(w, I, Shape{16, 128, 1}, I.x0, I.x1, true); }
OP(V_MFMA_SCALE_F32_32X32X64_F8F6F4) { matrix(w, I, Shape{32, 64, 1}, I.x0, I.x1, true); }

}  // namespace gfx950
