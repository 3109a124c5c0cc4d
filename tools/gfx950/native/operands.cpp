// DPP and SDWA: where a source's lanes or bytes come from, and which lanes or bytes of the destination are written.
#include "core.h"

namespace gfx950 {

// Lane that lane l reads under a DPP control word, or -1 where there is none.
static int dpp_source(u32 control, int l) {
    int row = l & ~15, i = l & 15;
    if (control < 0x100) return (l & ~3) | int(control >> (2 * (l & 3)) & 3);                       // quad_perm
    int n = int(control & 15);
    if (control <= 0x10f) return i + n < 16 ? l + n : -1;                                           // row_shl
    if (control <= 0x11f) return i >= n ? l - n : -1;                                               // row_shr
    if (control <= 0x12f) return row | ((i - n) & 15);                                              // row_ror
    switch (control) {
        case 0x130: return l < 63 ? l + 1 : -1;                                                     // wave_shl
        case 0x134: return (l + 1) & 63;                                                            // wave_rol
        case 0x138: return l - 1;                                                                   // wave_shr
        case 0x13c: return (l - 1) & 63;                                                            // wave_ror
        case 0x140: return row | (15 - i);                                                          // row_mirror
        case 0x141: return (l & ~7) | (7 - (l & 7));                                                // row_half_mirror
        case 0x142: return l >= 16 ? row - 1 : -1;                                                  // row_bcast:15
        case 0x143: return l >= 32 ? 31 : -1;                                                       // row_bcast:31
    }
    if (control >= 0x150 && control <= 0x15f) return row | n;                                       // row_newbcast
    return -1;
}

static void apply_dpp(Wave& w, const Ins& I, const u32* plain, u32* out) {
    u64 exec = w.exec(), through = 0;
    u32 rows = I.dpp_mask & 15, banks = I.dpp_mask >> 4 & 15;
    bool bound = I.dpp_mask >> 8 & 1;  // a lane with no source reads 0 instead of being left alone
    EACH_LANE {
        int from = dpp_source(I.dpp, l);
        bool valid = from >= 0 && (exec >> from & 1);
        out[l] = valid ? plain[from] : 0;
        bool chosen = (rows >> (l >> 4) & 1) && (banks >> ((l >> 2) & 3) & 1);
        if (chosen && (valid || bound)) through |= u64(1) << l;
    }
    w.dpp_lanes = through;
}

static u32 sdwa_select(u32 x, u32 sel, bool extend) {
    if (sel < 4) {
        u32 b = x >> (8 * sel) & 0xff;
        return extend ? u32(i32(i8(b))) : b;
    }
    if (sel < 6) {
        u32 h = x >> (16 * (sel - 4)) & 0xffff;
        return extend ? u32(i32(i16(h))) : h;
    }
    return x;
}

const u32* routed(Wave& w, const Ins& I, int k, const u32* plain, u32* buffer) {
    if (k > 1) return plain;
    if (I.flags & F_DPP) {
        if (k) return plain;
        u32 copy[LANES];
        std::memcpy(copy, plain, sizeof copy);  // plain may be the buffer itself
        apply_dpp(w, I, copy, buffer);
        return buffer;
    }
    u32 sel = k ? I.sdwa >> 8 & 7 : I.sdwa >> 5 & 7;
    bool extend = k ? I.sdwa >> 12 & 1 : I.sdwa >> 11 & 1;
    EACH_LANE buffer[l] = sdwa_select(plain[l], sel, extend);
    return buffer;
}

void commit_routed(Wave& w, const Ins& I, int row, const u32* r) {
    u32* d = w.row(row);
    u64 lanes = active(w, I);
    u32 sel = (I.flags & F_SDWA) && !(I.flags & F_SDWA_SDST) ? I.sdwa & 7 : 6, unused = I.sdwa >> 3 & 3;
    EACH_LANE {
        if (!(lanes >> l & 1)) continue;
        if (sel == 6) {
            d[l] = r[l];
            continue;
        }
        u32 width = sel < 4 ? 8 : 16, at = sel < 4 ? 8 * sel : 16 * (sel - 4);
        u32 field = (width == 8 ? 0xffu : 0xffffu) << at, x = (r[l] << at) & field;
        u32 top = 1u << (at + width - 1);
        if (unused == 0) d[l] = x;                                                                  // pad with zeros
        else if (unused == 1) d[l] = x | ((x & top) ? ~(top | (top - 1)) : 0);                      // sign above
        else d[l] = (d[l] & ~field) | x;                                                            // preserve
    }
}

}  // namespace gfx950
