// Values that move between lanes, and between the vector and the scalar registers.
#include <utility>

#include "core.h"

namespace gfx950 {

OP(V_READFIRSTLANE_B32) {
    u64 e = w.exec();
    int l = e ? __builtin_ctzll(e) : 0;
    w.s[I.dst] = I.a >= VECTOR ? w.row(I.a)[l] : w.s[I.a];
}
OP(V_READLANE_B32) { w.s[I.dst] = w.row(I.a)[w.s[I.b] & 63]; }
OP(V_WRITELANE_B32) { w.row(I.dst)[w.s[I.b] & 63] = w.s[I.a]; }

OP(V_MBCNT_LO_U32_B32) {
    Source A(w, I, 0), B(w, I, 1);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = u32(__builtin_popcount(A[l] & (l >= 32 ? ~0u : (1u << l) - 1))) + B[l];
    commit(w, I, r);
}
OP(V_MBCNT_HI_U32_B32) {
    Source A(w, I, 0), B(w, I, 1);
    alignas(64) u32 r[LANES];
    EACH_LANE r[l] = u32(__builtin_popcount(A[l] & (l < 32 ? 0 : (1u << (l - 32)) - 1))) + B[l];
    commit(w, I, r);
}

// Odd rows of the destination trade places with the even rows of the source (rows of 16, halves of 32).
OP(V_PERMLANE16_SWAP_B32) {
    u32 *d = w.row(I.dst), *s = w.row(I.a);
    for (int pair = 0; pair < 64; pair += 32)
        for (int l = 0; l < 16; l++) std::swap(s[pair + l], d[pair + l + 16]);
}
OP(V_PERMLANE32_SWAP_B32) {
    u32 *d = w.row(I.dst), *s = w.row(I.a);
    for (int l = 0; l < 32; l++) std::swap(s[l], d[l + 32]);
}
OP(V_SWAP_B32) {
    u32 *d = w.row(I.dst), *s = w.row(I.a);
    u64 e = w.exec();
    EACH_LANE if (e >> l & 1) std::swap(s[l], d[l]);
}

}  // namespace gfx950
