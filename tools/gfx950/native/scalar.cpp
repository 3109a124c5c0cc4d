// SOP1, SOP2, SOPC, SOPK and SOPP: the scalar unit, branches, waits.
#include "machine.h"

namespace gfx950 {

#define BINARY32(NAME, VALUE, CARRY)                  \
    OP(NAME) {                                        \
        u32 a = w.s[I.a], b = w.s[I.b], r = (VALUE);  \
        CARRY;                                        \
        w.s[I.dst] = r;                               \
    }
#define BINARY64(NAME, VALUE)                    \
    OP(NAME) {                                   \
        u64 a = w.s64(I.a), b = w.s64(I.b);      \
        u64 r = (VALUE);                         \
        w.scc = r != 0;                          \
        w.set_s64(I.dst, r);                     \
    }
#define NONZERO w.scc = r != 0

BINARY32(S_ADD_U32, a + b, w.scc = r < a)
BINARY32(S_SUB_U32, a - b, w.scc = b > a)
BINARY32(S_ADD_I32, a + b, w.scc = (~(a ^ b) & (a ^ r)) >> 31)
BINARY32(S_SUB_I32, a - b, w.scc = ((a ^ b) & (a ^ r)) >> 31)
BINARY32(S_ADDC_U32, a + b + w.scc, w.scc = u32((u64(a) + b + w.scc) >> 32))
BINARY32(S_SUBB_U32, a - b - w.scc, w.scc = u64(b) + w.scc > a)
BINARY32(S_MIN_I32, i32(a) < i32(b) ? a : b, w.scc = i32(a) < i32(b))
BINARY32(S_MIN_U32, a < b ? a : b, w.scc = a < b)
BINARY32(S_MAX_I32, i32(a) > i32(b) ? a : b, w.scc = i32(a) > i32(b))
BINARY32(S_MAX_U32, a > b ? a : b, w.scc = a > b)
BINARY32(S_AND_B32, a & b, NONZERO)
BINARY32(S_OR_B32, a | b, NONZERO)
BINARY32(S_XOR_B32, a ^ b, NONZERO)
BINARY32(S_ANDN2_B32, a & ~b, NONZERO)
BINARY32(S_ORN2_B32, a | ~b, NONZERO)
BINARY32(S_NAND_B32, ~(a & b), NONZERO)
BINARY32(S_NOR_B32, ~(a | b), NONZERO)
BINARY32(S_XNOR_B32, ~(a ^ b), NONZERO)
BINARY32(S_LSHL_B32, a << (b & 31), NONZERO)
BINARY32(S_LSHR_B32, a >> (b & 31), NONZERO)
BINARY32(S_ASHR_I32, u32(i32(a) >> (b & 31)), NONZERO)
BINARY32(S_BFM_B32, ((1u << (a & 31)) - 1) << (b & 31), (void)0)
BINARY32(S_MUL_I32, a * b, (void)0)
BINARY32(S_MUL_HI_U32, u32(u64(a) * b >> 32), (void)0)
BINARY32(S_MUL_HI_I32, u32(i64(i32(a)) * i32(b) >> 32), (void)0)
BINARY32(S_ABSDIFF_I32, i32(a) > i32(b) ? a - b : b - a, NONZERO)
BINARY32(S_LSHL1_ADD_U32, (a << 1) + b, w.scc = ((u64(a) << 1) + b) >> 32 != 0)
BINARY32(S_LSHL2_ADD_U32, (a << 2) + b, w.scc = ((u64(a) << 2) + b) >> 32 != 0)
BINARY32(S_LSHL3_ADD_U32, (a << 3) + b, w.scc = ((u64(a) << 3) + b) >> 32 != 0)
BINARY32(S_LSHL4_ADD_U32, (a << 4) + b, w.scc = ((u64(a) << 4) + b) >> 32 != 0)
BINARY32(S_PACK_LL_B32_B16, (a & 0xffff) | b << 16, (void)0)
BINARY32(S_PACK_LH_B32_B16, (a & 0xffff) | (b & 0xffff0000u), (void)0)
BINARY32(S_PACK_HH_B32_B16, a >> 16 | (b & 0xffff0000u), (void)0)
BINARY32(S_CSELECT_B32, w.scc ? a : b, (void)0)

BINARY64(S_AND_B64, a & b)
BINARY64(S_OR_B64, a | b)
BINARY64(S_XOR_B64, a ^ b)
BINARY64(S_ANDN2_B64, a & ~b)
BINARY64(S_ORN2_B64, a | ~b)
BINARY64(S_NAND_B64, ~(a & b))
BINARY64(S_NOR_B64, ~(a | b))
BINARY64(S_XNOR_B64, ~(a ^ b))

// The second operand of these is one register.
#define SHIFT64(NAME, VALUE)                   \
    OP(NAME) {                                 \
        u64 a = w.s64(I.a);                    \
        u32 b = w.s[I.b];                      \
        u64 r = (VALUE);                       \
        w.scc = r != 0;                        \
        w.set_s64(I.dst, r);                   \
    }
static u64 field(u64 a, u32 spec, u32 bits, bool sign) {
    u32 offset = spec & (bits - 1), width = spec >> 16 & 127;
    if (!width) return 0;
    if (bits == 32) a = sign ? u64(i64(i32(a))) : u64(u32(a));
    u64 x = sign ? u64(i64(a) >> offset) : a >> offset;
    if (width >= 64) return x;
    u32 up = 64 - width;
    return sign ? u64(i64(x << up) >> up) : x << up >> up;
}
SHIFT64(S_LSHL_B64, a << (b & 63))
SHIFT64(S_LSHR_B64, a >> (b & 63))
SHIFT64(S_ASHR_I64, u64(i64(a) >> (b & 63)))
SHIFT64(S_BFE_U64, field(a, b, 64, false))
SHIFT64(S_BFE_I64, field(a, b, 64, true))
BINARY32(S_BFE_U32, u32(field(a, b, 32, false)), NONZERO)
BINARY32(S_BFE_I32, u32(field(a, b, 32, true)), NONZERO)

OP(S_BFM_B64) { w.set_s64(I.dst, ((u64(1) << (w.s[I.a] & 63)) - 1) << (w.s[I.b] & 63)); }
OP(S_CSELECT_B64) { w.set_s64(I.dst, w.scc ? w.s64(I.a) : w.s64(I.b)); }

// ---- one operand ---------------------------------------------------------------------------------------------------

#define UNARY32(NAME, VALUE, CARRY)      \
    OP(NAME) {                           \
        u32 a = w.s[I.a], r = (VALUE);   \
        CARRY;                           \
        w.s[I.dst] = r;                  \
    }
#define FROM64(NAME, VALUE, CARRY)       \
    OP(NAME) {                           \
        u64 a = w.s64(I.a);              \
        u32 r = u32(VALUE);              \
        CARRY;                           \
        w.s[I.dst] = r;                  \
    }
static u32 reverse(u32 x) {
    u32 r = 0;
    for (int k = 0; k < 32; k++) r |= (x >> k & 1) << (31 - k);
    return r;
}
static u32 sign_run32(u32 a) {  // leading bits equal to the sign, -1 when all are
    u32 x = i32(a) < 0 ? ~a : a;
    return x ? u32(__builtin_clz(x)) : ~0u;
}
static u64 quads(u64 a) {
    u64 r = 0;
    for (int k = 0; k < 16; k++) r |= u64((a >> (4 * k) & 15) != 0) << k;
    return r;
}
static u64 whole_quads(u64 a) {
    u64 r = 0;
    for (int k = 0; k < 16; k++) r |= u64((a >> (4 * k) & 15) ? 15 : 0) << (4 * k);
    return r;
}
UNARY32(S_MOV_B32, a, (void)0)
UNARY32(S_NOT_B32, ~a, NONZERO)
UNARY32(S_WQM_B32, u32(whole_quads(a)), NONZERO)
UNARY32(S_QUADMASK_B32, u32(quads(a)), NONZERO)
UNARY32(S_BREV_B32, reverse(a), (void)0)
UNARY32(S_BCNT0_I32_B32, u32(32 - __builtin_popcount(a)), NONZERO)
UNARY32(S_BCNT1_I32_B32, u32(__builtin_popcount(a)), NONZERO)
UNARY32(S_FF0_I32_B32, ~a ? u32(__builtin_ctz(~a)) : ~0u, (void)0)
UNARY32(S_FF1_I32_B32, a ? u32(__builtin_ctz(a)) : ~0u, (void)0)
UNARY32(S_FLBIT_I32_B32, a ? u32(__builtin_clz(a)) : ~0u, (void)0)
UNARY32(S_FLBIT_I32, sign_run32(a), (void)0)
UNARY32(S_SEXT_I32_I8, u32(i32(i8(a))), (void)0)
UNARY32(S_SEXT_I32_I16, u32(i32(i16(a))), (void)0)
UNARY32(S_ABS_I32, i32(a) < 0 ? 0u - a : a, NONZERO)
FROM64(S_BCNT0_I32_B64, 64 - __builtin_popcountll(a), NONZERO)
FROM64(S_BCNT1_I32_B64, __builtin_popcountll(a), NONZERO)
FROM64(S_FF0_I32_B64, ~a ? __builtin_ctzll(~a) : -1, (void)0)
FROM64(S_FF1_I32_B64, a ? __builtin_ctzll(a) : -1, (void)0)
FROM64(S_FLBIT_I32_B64, a ? __builtin_clzll(a) : -1, (void)0)
FROM64(S_FLBIT_I32_I64, (i64(a) < 0 ? ~a : a) ? __builtin_clzll(i64(a) < 0 ? ~a : a) : -1, (void)0)

#define UNARY64(NAME, VALUE, CARRY)      \
    OP(NAME) {                           \
        u64 a = w.s64(I.a), r = (VALUE); \
        CARRY;                           \
        w.set_s64(I.dst, r);             \
    }
UNARY64(S_MOV_B64, a, (void)0)
UNARY64(S_NOT_B64, ~a, NONZERO)
UNARY64(S_WQM_B64, whole_quads(a), NONZERO)
UNARY64(S_QUADMASK_B64, quads(a), NONZERO)
UNARY64(S_BREV_B64, u64(reverse(u32(a))) << 32 | reverse(u32(a >> 32)), (void)0)

OP(S_CMOV_B32) { if (w.scc) w.s[I.dst] = w.s[I.a]; }
OP(S_CMOV_B64) { if (w.scc) w.set_s64(I.dst, w.s64(I.a)); }
OP(S_BITSET0_B32) { w.s[I.dst] &= ~(1u << (w.s[I.a] & 31)); }
OP(S_BITSET1_B32) { w.s[I.dst] |= 1u << (w.s[I.a] & 31); }
OP(S_BITSET0_B64) { w.set_s64(I.dst, w.s64(I.dst) & ~(u64(1) << (w.s[I.a] & 63))); }
OP(S_BITSET1_B64) { w.set_s64(I.dst, w.s64(I.dst) | u64(1) << (w.s[I.a] & 63)); }
OP(S_BITREPLICATE_B64_B32) {
    u64 r = 0;
    for (int k = 0; k < 32; k++) r |= u64(w.s[I.a] >> k & 1 ? 3 : 0) << (2 * k);
    w.set_s64(I.dst, r);
}

#define SAVE_EXEC(NAME, VALUE)                    \
    OP(NAME) {                                    \
        u64 a = w.s64(I.a), e = w.exec();         \
        u64 r = (VALUE);                          \
        w.set_s64(I.dst, e);                      \
        w.set_s64(EXEC, r);                       \
        w.scc = r != 0;                           \
    }
SAVE_EXEC(S_AND_SAVEEXEC_B64, a & e)
SAVE_EXEC(S_OR_SAVEEXEC_B64, a | e)
SAVE_EXEC(S_XOR_SAVEEXEC_B64, a ^ e)
SAVE_EXEC(S_ANDN2_SAVEEXEC_B64, a & ~e)
SAVE_EXEC(S_ORN2_SAVEEXEC_B64, a | ~e)
SAVE_EXEC(S_NAND_SAVEEXEC_B64, ~(a & e))
SAVE_EXEC(S_NOR_SAVEEXEC_B64, ~(a | e))
SAVE_EXEC(S_XNOR_SAVEEXEC_B64, ~(a ^ e))
SAVE_EXEC(S_ANDN1_SAVEEXEC_B64, ~a & e)
SAVE_EXEC(S_ORN1_SAVEEXEC_B64, ~a | e)
#define WRITE_EXEC(NAME, VALUE)           \
    OP(NAME) {                            \
        u64 a = w.s64(I.a), e = w.exec(); \
        u64 r = (VALUE);                  \
        w.set_s64(I.dst, r);              \
        w.set_s64(EXEC, r);               \
        w.scc = r != 0;                   \
    }
WRITE_EXEC(S_ANDN1_WREXEC_B64, ~a & e)
WRITE_EXEC(S_ANDN2_WREXEC_B64, a & ~e)

// ---- constants and comparisons ---------------------------------------------------------------------------------------

OP(S_MOVK_I32) { w.s[I.dst] = u32(I.imm); }
OP(S_CMOVK_I32) { if (w.scc) w.s[I.dst] = u32(I.imm); }
OP(S_MULK_I32) { w.s[I.dst] *= u32(I.imm); }
OP(S_ADDK_I32) {
    i64 r = i64(i32(w.s[I.dst])) + I.imm;
    w.scc = r != i32(r);
    w.s[I.dst] = u32(r);
}
#define COMPARE(NAME, REL)                                                                     \
    OP(S_CMP_##NAME##_I32) { w.scc = i32(w.s[I.a]) REL i32(w.s[I.b]); }                        \
    OP(S_CMP_##NAME##_U32) { w.scc = w.s[I.a] REL w.s[I.b]; }                                  \
    OP(S_CMPK_##NAME##_I32) { w.scc = i32(w.s[I.dst]) REL I.imm; }                             \
    OP(S_CMPK_##NAME##_U32) { w.scc = w.s[I.dst] REL u32(u16(I.imm)); }
COMPARE(EQ, ==)
COMPARE(LG, !=)
COMPARE(GT, >)
COMPARE(GE, >=)
COMPARE(LT, <)
COMPARE(LE, <=)
OP(S_CMP_EQ_U64) { w.scc = w.s64(I.a) == w.s64(I.b); }
OP(S_CMP_LG_U64) { w.scc = w.s64(I.a) != w.s64(I.b); }
OP(S_BITCMP0_B32) { w.scc = !(w.s[I.a] >> (w.s[I.b] & 31) & 1); }
OP(S_BITCMP1_B32) { w.scc = w.s[I.a] >> (w.s[I.b] & 31) & 1; }
OP(S_BITCMP0_B64) { w.scc = !(w.s64(I.a) >> (w.s[I.b] & 63) & 1); }
OP(S_BITCMP1_B64) { w.scc = w.s64(I.a) >> (w.s[I.b] & 63) & 1; }

// ---- hardware registers ----------------------------------------------------------------------------------------------

enum HardwareRegister { HW_MODE = 1, HW_STATUS = 2, HW_TRAPSTS = 3, HW_ID = 4, HW_XCC_ID = 20 };

void Wave::apply_mode() {
    if (mode & 15) fail("unsupported", "a rounding mode other than nearest-even");
    flush32 = (mode >> 4 & 3) != 3;
    flush16 = (mode >> 6 & 3) != 3;
    ieee = mode >> 9 & 1;
    fp16_ovfl = mode >> 23 & 1;
    if (flush32 && (mode >> 4 & 3) != 0) fail("unsupported", "flushing only the inputs or only the results of 32-bit denormals");
}
static u32 read_register(const Wave& w, int id) {
    switch (id) {
        case HW_MODE: return w.mode;
        case HW_STATUS: return w.scc | u32(w.exec() == 0) << 9 | u32(w.s64(VCC) == 0) << 10;
        case HW_TRAPSTS: return 0;
        case HW_ID: return u32(w.id & 15);
        case HW_XCC_ID: return u32(w.group->xcd);
    }
    w.fail("unsupported", "hardware register " + std::to_string(id));
}
OP(S_GETREG_B32) {
    u32 spec = u32(I.imm), offset = spec >> 6 & 31, width = (spec >> 11 & 31) + 1;
    u64 x = read_register(w, int(spec & 63)) >> offset;
    w.s[I.dst] = u32(x & ((u64(1) << width) - 1));
}
static void set_register(Wave& w, u32 spec, u32 value) {
    u32 id = spec & 63, offset = spec >> 6 & 31, width = (spec >> 11 & 31) + 1;
    if (id != HW_MODE) w.fail("unsupported", "writing hardware register " + std::to_string(id));
    u32 field = u32(((u64(1) << width) - 1) << offset);
    w.mode = (w.mode & ~field) | (value << offset & field);
    w.apply_mode();
}
OP(S_SETREG_B32) { set_register(w, u32(I.imm), w.s[I.dst]); }
OP(S_SETREG_IMM32_B32) { set_register(w, u32(I.imm), w.s[I.a]); }

// ---- program flow ------------------------------------------------------------------------------------------------------

OP(S_NOP) {}
OP(S_SETPRIO) {}
OP(S_SETHALT) { if (I.imm & 1) w.fail("unsupported", "s_sethalt"); }
OP(S_ICACHE_INV) {}
OP(S_INCPERFLEVEL) {}
OP(S_DECPERFLEVEL) {}
OP(S_TTRACEDATA) {}
OP(S_WAKEUP) {}
OP(S_SLEEP) {
    w.yield = true;
    w.machine->clock_idle(w, u64(I.imm & 127) * 64);
}
OP(S_WAITCNT) { wait_counters(w, (I.imm & 15) | (I.imm >> 14 & 3) << 4, I.imm >> 8 & 15); }
OP(S_BARRIER) { w.state = State::Barrier; }
OP(S_ENDPGM) { w.state = State::Done; }  // stores still on their way happen later: the scheduler sees to them
OP(S_TRAP) { w.fail("trap", "s_trap " + std::to_string(I.imm & 255) + ": the kernel aborted (an assertion on the device)"); }
OP(S_BRANCH) { w.next = I.target; }
OP(S_CBRANCH_SCC0) { if (!w.scc) w.next = I.target; }
OP(S_CBRANCH_SCC1) { if (w.scc) w.next = I.target; }
OP(S_CBRANCH_VCCZ) { if (!w.s64(VCC)) w.next = I.target; }
OP(S_CBRANCH_VCCNZ) { if (w.s64(VCC)) w.next = I.target; }
OP(S_CBRANCH_EXECZ) { if (!w.exec()) w.next = I.target; }
OP(S_CBRANCH_EXECNZ) { if (w.exec()) w.next = I.target; }
// Program addresses are real: entry address of the code object's image plus the offset of the instruction.
OP(S_GETPC_B64) { w.set_s64(I.dst, w.machine->code_address(w, w.next)); }
OP(S_SETPC_B64) { w.next = w.machine->index_of(w, w.s64(I.a)); }
OP(S_SWAPPC_B64) {
    u64 to = w.s64(I.a);
    w.set_s64(I.dst, w.machine->code_address(w, w.next));
    w.next = w.machine->index_of(w, to);
}
OP(S_CALL_B64) {
    w.set_s64(I.dst, w.machine->code_address(w, w.next));
    w.next = I.target;
}

}  // namespace gfx950
