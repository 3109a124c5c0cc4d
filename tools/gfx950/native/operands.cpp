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

struct DppTable {
    bool made = false;
    u32 from[LANES];
    u64 exists = 0;  // lanes that have a source
};
static const DppTable& dpp_table(u32 control) {
    static DppTable tables[512];
    DppTable& t = tables[control & 511];
    if (!t.made) {
        EACH_LANE {
            int from = dpp_source(control & 511, l);
            t.from[l] = from < 0 ? 0 : u32(from);
            t.exists |= u64(from >= 0) << l;
        }
        t.made = true;
    }
    return t;
}
static void apply_dpp(Wave& w, const Ins& I, const u32* plain, u32* out) {
    const DppTable& t = dpp_table(I.dpp);
    u64 exec = w.exec(), valid = t.exists, chosen = 0;
    if (exec != ALL)
        EACH_LANE if (!(exec >> t.from[l] & 1)) valid &= ~(u64(1) << l);
    for (int row = 0; row < 4; row++)
        if (I.dpp_mask >> row & 1)
            for (int bank = 0; bank < 4; bank++)
                if (I.dpp_mask >> (4 + bank) & 1) chosen |= u64(15) << (16 * row + 4 * bank);
    alignas(64) u32 mask[LANES];
    expand(valid, mask);
    EACH_LANE out[l] = plain[t.from[l]] & mask[l];
    bool bound = I.dpp_mask >> 8 & 1;  // a lane with no source reads 0 instead of being left alone
    w.dpp_lanes = chosen & (bound ? ALL : valid);
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
    if (sel == 6) {
        alignas(64) u32 mask[LANES];
        expand(lanes, mask);
        EACH_LANE d[l] = (r[l] & mask[l]) | (d[l] & ~mask[l]);
        return;
    }
    EACH_LANE {
        if (!(lanes >> l & 1)) continue;
        u32 width = sel < 4 ? 8 : 16, at = sel < 4 ? 8 * sel : 16 * (sel - 4);
        u32 field = (width == 8 ? 0xffu : 0xffffu) << at, x = (r[l] << at) & field;
        u32 top = 1u << (at + width - 1);
        if (unused == 0) d[l] = x;                                                                  // pad with zeros
        else if (unused == 1) d[l] = x | ((x & top) ? ~(top | (top - 1)) : 0);                      // sign above
        else d[l] = (d[l] & ~field) | x;                                                            // preserve
    }
}

}  // namespace gfx950
