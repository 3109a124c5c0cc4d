// MFMA: D = A * B + C over one wave.
//
// Lane l of a matrix with M rows holds row l % M; the lane group l / M holds a slice of K, or one of several independent
// blocks. Eight-bit operands of the K=128 / K=64 forms hold two runs of 16 per lane group instead of one run of 32.
// The sum runs over K in order in single precision with fused multiply-adds; the hardware's own order inside one
// instruction is not published, so compare results with a tolerance.
#include <algorithm>

#include "numeric.h"

namespace gfx950 {

enum Element { E_FP8 = IS_FP8, E_BF8, E_FP6, E_BF6, E_FP4, E_F32, E_F16, E_BF16, E_I8 };

struct Shape {
    int m, k, blocks;
    int groups() const { return LANES / m / blocks; }   // lane groups that share one block's K
    int run() const { return k / groups(); }            // values of K in one lane
    int outputs() const { return m * m * blocks / LANES; }
};

static inline float element(const u32* rows, int type, int j, int l) {
    switch (type) {
        case E_F32: return real(rows[j * LANES + l]);
        case E_F16: return half_real(rows[(j >> 1) * LANES + l] >> (16 * (j & 1)) & 0xffff);
        case E_BF16: return real((j & 1) ? rows[(j >> 1) * LANES + l] & 0xffff0000u : rows[(j >> 1) * LANES + l] << 16);
        case E_I8: return float(i8(rows[(j >> 2) * LANES + l] >> (8 * (j & 3))));
        case E_FP8:
        case E_BF8: return DECODE[type][rows[(j >> 2) * LANES + l] >> (8 * (j & 3)) & 255];
        case E_FP4: return DECODE[type][rows[(j >> 3) * LANES + l] >> (4 * (j & 7)) & 15];
    }
    int bit = 6 * j;
    u32 x = rows[(bit >> 5) * LANES + l] >> (bit & 31);
    if ((bit & 31) > 26) x |= rows[((bit >> 5) + 1) * LANES + l] << (32 - (bit & 31));
    return DECODE[type][x & 63];
}

// out[k][i] for one block; the lanes of a group are contiguous, so the inner loop is over them.
template <int TYPE>
static void spread(const u32* rows, const Shape& s, int block, float* out) {
    int run = s.run();
    bool split = (TYPE == E_FP8 || TYPE == E_BF8) && run == 32;
    for (int g = 0; g < s.groups(); g++) {
        int first = (block * s.groups() + g) * s.m;
        for (int j = 0; j < run; j++) {
            int k = split ? (j >> 4) * (s.k / 2) + g * 16 + (j & 15) : g * run + j;
            float* o = out + k * s.m;
            for (int i = 0; i < s.m; i++) o[i] = element(rows, TYPE, j, first + i);
        }
    }
}
static void spread(const u32* rows, int type, const Shape& s, int block, float* out) {
    switch (type) {
        case E_F32: return spread<E_F32>(rows, s, block, out);
        case E_F16: return spread<E_F16>(rows, s, block, out);
        case E_BF16: return spread<E_BF16>(rows, s, block, out);
        case E_I8: return spread<E_I8>(rows, s, block, out);
        case E_FP8: return spread<E_FP8>(rows, s, block, out);
        case E_BF8: return spread<E_BF8>(rows, s, block, out);
        case E_FP6: return spread<E_FP6>(rows, s, block, out);
        case E_BF6: return spread<E_BF6>(rows, s, block, out);
        default: return spread<E_FP4>(rows, s, block, out);
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

struct Scales {
    bool on = false;
    float a[4 * 32], b[4 * 32];  // [K / 32][row]
};

template <int M>
static void multiply(const float* A, const float* B, const Shape& s, const Scales& scales, float* C) {
    constexpr int W = M < 16 ? M : 16, R = M < 8 ? M : 8;
    int parts = scales.on ? s.k / 32 : 1, length = s.k / parts;
    for (int j0 = 0; j0 < M; j0 += W)
        for (int i0 = 0; i0 < M; i0 += R) {
            float sum[R][W];
            for (int i = 0; i < R; i++)
                for (int j = 0; j < W; j++) sum[i][j] = scales.on ? 0.f : C[(i0 + i) * M + j0 + j];
            for (int p = 0; p < parts; p++) {
                float part[R][W];
                for (int i = 0; i < R; i++)
                    for (int j = 0; j < W; j++) part[i][j] = scales.on ? 0.f : sum[i][j];
                for (int k = p * length; k < (p + 1) * length; k++) {
                    const float *a = A + k * M + i0, *b = B + k * M + j0;
                    for (int i = 0; i < R; i++)
                        for (int j = 0; j < W; j++) part[i][j] = __builtin_fmaf(a[i], b[j], part[i][j]);
                }
                for (int i = 0; i < R; i++)
                    for (int j = 0; j < W; j++)
                        sum[i][j] = scales.on ? float(double(part[i][j]) * scales.a[p * M + i0 + i] * scales.b[p * M + j0 + j] + sum[i][j])
                                              : part[i][j];
            }
            for (int i = 0; i < R; i++)
                for (int j = 0; j < W; j++) {
                    float& c = C[(i0 + i) * M + j0 + j];
                    c = scales.on ? c + sum[i][j] : sum[i][j];
                }
        }
}

static void matrix(Wave& w, const Ins& I, const Shape& s, int type_a, int type_b, bool scaled = false) {
    if (I.a < VECTOR || I.b < VECTOR) w.fail("unsupported", "a scalar A or B operand of MFMA");
    alignas(64) static thread_local float A[32 * 128], B[32 * 128];
    Scales scales;
    if (scaled) {
        scales.on = true;
        for (int side = 0; side < 2; side++) {
            Source e(w, side ? I.imm : I.dst2);
            int byte = (side ? I.imm2 >> 2 : I.imm2) & 3;
            EACH_LANE (side ? scales.b : scales.a)[l / s.m * s.m + l % s.m] = exponent_scale(e[l] >> (8 * byte) & 255);
        }
    }
    alignas(64) float C[32 * 32 * 2];
    int square = s.m * s.m, block, row, column;
    u32 spread_c[LANES];
    for (int v = 0; v < s.outputs(); v++) {
        const u32* c = spread_c;
        if (I.c >= VECTOR) c = w.row(I.c + v);
        else std::fill(spread_c, spread_c + LANES, w.s[I.c]);
        EACH_LANE {
            place(s, v, l, block, row, column);
            C[block * square + row * s.m + column] = real(c[l]);
        }
    }
    for (int b = 0; b < s.blocks; b++) {
        spread(w.row(I.a), type_a, s, b, A);
        spread(w.row(I.b), type_b, s, b, B);
        float* c = C + b * square;
        if (s.m == 4) multiply<4>(A, B, s, scales, c);
        else if (s.m == 16) multiply<16>(A, B, s, scales, c);
        else multiply<32>(A, B, s, scales, c);
    }
    for (int v = 0; v < s.outputs(); v++) {
        u32* d = w.row(I.dst + v);
        EACH_LANE {
            place(s, v, l, block, row, column);
            d[l] = bits(C[block * square + row * s.m + column]);
        }
    }
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
