// DS instructions: local memory of a workgroup, its atomics, and the lane exchanges that go through its crossbar.
#include <algorithm>

#include "machine.h"
#include "numeric.h"

namespace gfx950 {

static u8* place(Wave& w, u32 address, u32 n, bool store, int lane) {
    if (u64(address) + n > w.group->lds_bytes)
        throw Stop("out of bounds", std::string("LDS ") + (store ? "store" : "load") + " of " + std::to_string(n) + " bytes, the workgroup has " +
                   std::to_string(w.group->lds_bytes), &w, lane, address);
    return reinterpret_cast<u8*>(w.group->lds.data()) + address;
}
static void aligned(Wave& w, const Ins& I, u32 address, u32 n, int lane) {
    u32 need = n >= 16 || n == 12 ? 16 : n;
    if ((address & (need - 1)) && (w.machine->checks & CHECK_MISALIGNED)) w.machine->report(w, I, REPORT_MISALIGNED, lane, address);
}
void lds_store(Wave& w, const Ins& I, u32 address, const void* in, u32 n, int lane) {
    std::memcpy(place(w, address, n, true, lane), in, n);
    aligned(w, I, address, n, lane);
    if (!w.group->lds_known.empty()) std::memset(w.group->lds_known.data() + address, 1, n);
}
void lds_load(Wave& w, const Ins& I, u32 address, void* out, u32 n, int lane) {
    std::memcpy(out, place(w, address, n, false, lane), n);
    aligned(w, I, address, n, lane);
    if (!w.group->lds_known.empty())
        for (u32 k = 0; k < n; k++)
            if (!w.group->lds_known[address + k]) {
                w.machine->report(w, I, REPORT_UNINITIALISED_LDS, lane, address + k);
                break;
            }
}

// Extra passes over the 64 banks: lanes are served in groups that together ask for at most 64 dwords.
static void count_conflicts(Wave& w, u64 lanes, const u32* address, u32 bytes) {
    if (!(w.machine->checks & CHECK_PROFILE)) return;
    int together = int(LANES / std::max<u32>(1, bytes / 4));
    if (bytes == 12) together = 16;
    u64 extra = 0;
    for (int first = 0; first < LANES; first += together) {
        u32 seen[64][LANES];
        int n[64] = {0}, most = 1;
        for (int l = first; l < std::min(LANES, first + together); l++) {
            if (!(lanes >> l & 1)) continue;
            for (u32 k = 0; k < std::max<u32>(1, bytes / 4); k++) {
                u32 word = address[l] / 4 + k, bank = word & 63;
                bool known = false;
                for (int q = 0; q < n[bank]; q++) known |= seen[bank][q] == word;
                if (!known && n[bank] < LANES) seen[bank][n[bank]++] = word;
                most = std::max(most, n[bank]);
            }
        }
        extra += u64(most - 1);
    }
    w.machine->traffic(w)[SPACES * 8] += extra;
}
static void count(Wave& w, u64 lanes, u32 bytes, bool store) {
    w.machine->count(w, SPACE_LDS, SCOPE_GROUP, store, u64(__builtin_popcountll(lanes)) * bytes);
}

// True when no lane needs a look of its own: all inside, all aligned, nothing followed byte by byte.
static bool plain(Wave& w, u64 lanes, const u32* address, u32 bytes) {
    if (!w.group->lds_known.empty()) return false;
    u32 most = 0, low_bits = 0;
    if (lanes == ALL) {
        EACH_LANE {
            most = std::max(most, address[l]);
            low_bits |= address[l];
        }
    } else {
        for (u64 m = lanes; m; m &= m - 1) {
            most = std::max(most, address[__builtin_ctzll(m)]);
            low_bits |= address[__builtin_ctzll(m)];
        }
    }
    return u64(most) + bytes <= w.group->lds_bytes && !(low_bits & (bytes == 12 ? 15 : bytes - 1));
}
template <int WORDS>
static void gather(Wave& w, u64 lanes, const u32* address, int row) {
    const u8* base = reinterpret_cast<const u8*>(w.group->lds.data());
    u32* d = w.row(row);
    for (u64 m = lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[WORDS];
        std::memcpy(x, base + address[l], sizeof x);
        for (int k = 0; k < WORDS; k++) d[k * LANES + l] = x[k];
    }
}
static void gather(Wave& w, u64 lanes, const u32* address, int row, u32 words) {
    if (words == 1) gather<1>(w, lanes, address, row);
    else if (words == 2) gather<2>(w, lanes, address, row);
    else if (words == 3) gather<3>(w, lanes, address, row);
    else gather<4>(w, lanes, address, row);
}
template <int WORDS>
static void scatter(Wave& w, u64 lanes, const u32* address, int row) {
    u8* base = reinterpret_cast<u8*>(w.group->lds.data());
    const u32* s = w.row(row);
    for (u64 m = lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[WORDS];
        for (int k = 0; k < WORDS; k++) x[k] = s[k * LANES + l];
        std::memcpy(base + address[l], x, sizeof x);
    }
}

// ---- loads -------------------------------------------------------------------------------------------------------------------

static void read(Wave& w, const Ins& I, u32 bytes, u32 offset, int row) {
    const Source A(w, I.a);
    u32 address[LANES], words = bytes / 4;
    u64 lanes = w.exec();
    EACH_LANE address[l] = A[l] + offset;
    if (plain(w, lanes, address, bytes)) {
        gather(w, lanes, address, row, words);
    } else {
        for (u64 m = lanes; m; m &= m - 1) {
            int l = __builtin_ctzll(m);
            u32 x[4];
            lds_load(w, I, address[l], x, bytes, l);
            for (u32 k = 0; k < words; k++) w.row(row + int(k))[l] = x[k];
        }
    }
    count(w, lanes, bytes, false);
    count_conflicts(w, lanes, address, bytes);
}
static void read_one(Wave& w, const Ins& I, u32 bytes) {
    drain_lds(w);
    read(w, I, bytes, u32(I.imm), I.dst);
    note_issue(w, I, nullptr);
}
OP(DS_READ_B32) { read_one(w, I, 4); }
OP(DS_READ_B64) { read_one(w, I, 8); }
OP(DS_READ_B96) { read_one(w, I, 12); }
OP(DS_READ_B128) { read_one(w, I, 16); }

// Two reads from one address register; it may be overwritten by the first result, so it is copied by read().
static void read_two(Wave& w, const Ins& I, u32 bytes, u32 unit) {
    drain_lds(w);
    alignas(64) u32 address[LANES];
    std::memcpy(address, w.row(I.a), sizeof address);
    for (int h = 0; h < 2; h++) {
        u32 offset = u32(h ? I.imm2 : I.imm) * bytes * unit;
        u64 lanes = w.exec();
        u32 at[LANES];
        EACH_LANE at[l] = address[l] + offset;
        if (plain(w, lanes, at, bytes)) gather(w, lanes, at, I.dst + h * int(bytes) / 4, bytes / 4);
        else for (u64 m = lanes; m; m &= m - 1) {
            int l = __builtin_ctzll(m);
            u32 x[2];
            lds_load(w, I, at[l], x, bytes, l);
            for (u32 k = 0; k < bytes / 4; k++) w.row(I.dst + int(h * bytes / 4 + k))[l] = x[k];
        }
        count(w, lanes, bytes, false);
        count_conflicts(w, lanes, at, bytes);
    }
    note_issue(w, I, nullptr);
}
OP(DS_READ2_B32) { read_two(w, I, 4, 1); }
OP(DS_READ2_B64) { read_two(w, I, 8, 1); }
OP(DS_READ2ST64_B32) { read_two(w, I, 4, 64); }
OP(DS_READ2ST64_B64) { read_two(w, I, 8, 64); }

enum class Half { Whole, Low, High };
static void read_small(Wave& w, const Ins& I, u32 bytes, bool extend, Half half) {
    drain_lds(w);
    const Source A(w, I.a);
    u32 address[LANES];
    EACH_LANE address[l] = A[l] + u32(I.imm);
    for (u64 m = w.exec(); m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x = 0;
        lds_load(w, I, address[l], &x, bytes, l);
        if (extend) x = bytes == 1 ? u32(i32(i8(x))) : u32(i32(i16(x)));
        u32& d = w.row(I.dst)[l];
        d = half == Half::Whole ? x : half == Half::Low ? (d & 0xffff0000u) | (x & 0xffff) : (d & 0xffff) | x << 16;
    }
    count(w, w.exec(), bytes, false);
    count_conflicts(w, w.exec(), address, 4);
    note_issue(w, I, nullptr);
}
OP(DS_READ_U8) { read_small(w, I, 1, false, Half::Whole); }
OP(DS_READ_I8) { read_small(w, I, 1, true, Half::Whole); }
OP(DS_READ_U16) { read_small(w, I, 2, false, Half::Whole); }
OP(DS_READ_I16) { read_small(w, I, 2, true, Half::Whole); }
OP(DS_READ_U8_D16) { read_small(w, I, 1, false, Half::Low); }
OP(DS_READ_U8_D16_HI) { read_small(w, I, 1, false, Half::High); }
OP(DS_READ_I8_D16) { read_small(w, I, 1, true, Half::Low); }
OP(DS_READ_I8_D16_HI) { read_small(w, I, 1, true, Half::High); }
OP(DS_READ_U16_D16) { read_small(w, I, 2, false, Half::Low); }
OP(DS_READ_U16_D16_HI) { read_small(w, I, 2, false, Half::High); }

// Transposing reads. Sixteen lanes read a block of rows; laid end to end, their elements form a matrix 16 wide, and lane i
// receives column i.
static void read_transposed(Wave& w, const Ins& I, int width, u32 bytes) {
    drain_lds(w);
    const Source A(w, I.a);
    int n = int(bytes) * 8 / width, words = int(bytes) / 4;
    u32 address[LANES];
    static thread_local u32 element[LANES * 16], out[3][LANES];
    if (w.exec() != ALL) w.fail("unsupported", "a transposing LDS read with inactive lanes");
    EACH_LANE {
        address[l] = A[l] + u32(I.imm);
        u32 x[4] = {0, 0, 0, 0};
        lds_load(w, I, address[l], x, bytes, l);
        for (int k = 0; k < n; k++) {
            int bit = k * width;
            u64 pair = u64(x[bit >> 5]) | u64(x[(bit >> 5) + 1]) << 32;
            element[l * n + k] = u32(pair >> (bit & 31)) & ((1u << width) - 1);
        }
    }
    std::memset(out, 0, sizeof out);
    EACH_LANE {
        const u32* block = element + (l & ~15) * n;
        for (int k = 0; k < n; k++) {
            int bit = k * width;
            u64 x = u64(block[16 * k + (l & 15)]) << (bit & 31);
            out[bit >> 5][l] |= u32(x);
            if ((bit & 31) + width > 32) out[(bit >> 5) + 1][l] |= u32(x >> 32);
        }
    }
    for (int k = 0; k < words; k++) std::memcpy(w.row(I.dst + k), out[k], sizeof out[k]);
    count(w, ALL, bytes, false);
    count_conflicts(w, ALL, address, bytes);
    note_issue(w, I, nullptr);
}
OP(DS_READ_B64_TR_B16) { read_transposed(w, I, 16, 8); }
OP(DS_READ_B64_TR_B8) { read_transposed(w, I, 8, 8); }
OP(DS_READ_B64_TR_B4) { read_transposed(w, I, 4, 8); }
OP(DS_READ_B96_TR_B6) { read_transposed(w, I, 6, 12); }

// ---- stores ------------------------------------------------------------------------------------------------------------------

static void perform_write(Wave& w, MemOp& op) {
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[4];
        for (int k = 0; k < 4; k++) x[k] = op.data[k][l];
        lds_store(w, *op.ins, u32(op.address[l]), x, op.size, l);
    }
    w.machine->effect();
}
static void write(Wave& w, const Ins& I, u32 bytes, u32 offset, int row, int shift, bool last) {
    const Source A(w, I.a);
    u32 address[LANES];
    u64 lanes = w.exec();
    EACH_LANE address[l] = A[l] + offset;
    count(w, lanes, bytes, true);
    count_conflicts(w, lanes, address, std::max<u32>(bytes, 4));
    if (!w.machine->weak()) {
        int words = std::max<int>(1, int(bytes) / 4);
        if (bytes >= 4 && plain(w, lanes, address, bytes)) {
            if (words == 1) scatter<1>(w, lanes, address, row);
            else if (words == 2) scatter<2>(w, lanes, address, row);
            else if (words == 3) scatter<3>(w, lanes, address, row);
            else scatter<4>(w, lanes, address, row);
        } else for (u64 m = lanes; m; m &= m - 1) {
            int l = __builtin_ctzll(m);
            u32 x[4];
            for (int k = 0; k < words; k++) x[k] = w.row(row + k)[l] >> shift;
            lds_store(w, I, address[l], x, bytes, l);
        }
        w.machine->effect();
        if (last) note_issue(w, I, nullptr);
        return;
    }
    MemOp* op = w.machine->take_op();
    op->perform = perform_write;
    op->ins = &I;
    op->lanes = lanes;
    op->size = bytes;
    op->store = op->lds = true;
    op->low = op->high = 0;
    EACH_LANE op->address[l] = address[l];
    for (int k = 0; k < std::max<int>(1, int(bytes) / 4); k++)
        EACH_LANE op->data[k][l] = w.row(row + k)[l] >> shift;
    note_issue(w, I, op);
}
#define WRITES(NAME, BYTES, SHIFT) OP(NAME) { write(w, I, BYTES, u32(I.imm), I.b, SHIFT, true); }
WRITES(DS_WRITE_B8, 1, 0)
WRITES(DS_WRITE_B16, 2, 0)
WRITES(DS_WRITE_B8_D16_HI, 1, 16)
WRITES(DS_WRITE_B16_D16_HI, 2, 16)
WRITES(DS_WRITE_B32, 4, 0)
WRITES(DS_WRITE_B64, 8, 0)
WRITES(DS_WRITE_B96, 12, 0)
WRITES(DS_WRITE_B128, 16, 0)
// Both halves of a two-address write are one entry of the counter and happen together.
static void perform_write_two(Wave& w, MemOp& op) {
    perform_write(w, op);
    u32 half = op.size / 4;
    EACH_LANE op.address[l] += op.lds_base;
    for (u32 k = 0; k < half; k++) std::memcpy(op.data[k], op.data[half + k], sizeof op.data[k]);
    perform_write(w, op);
}
static void write_two(Wave& w, const Ins& I, u32 bytes, u32 unit) {
    if (!w.machine->weak()) {
        write(w, I, bytes, u32(I.imm) * bytes * unit, I.b, 0, false);
        write(w, I, bytes, u32(I.imm2) * bytes * unit, I.c, 0, true);
        return;
    }
    MemOp& op = *w.machine->take_op();
    op = MemOp();
    op.ins = &I;
    op.perform = perform_write_two;
    op.lanes = w.exec();
    op.size = bytes;
    op.store = op.lds = true;
    op.lds_base = u32(I.imm2 - I.imm) * bytes * unit;  // from the first half to the second
    u32 address[LANES];
    for (u32 offset : {u32(I.imm2), u32(I.imm)}) {
        EACH_LANE address[l] = w.row(I.a)[l] + offset * bytes * unit;
        count(w, op.lanes, bytes, true);
        count_conflicts(w, op.lanes, address, bytes);
    }
    EACH_LANE op.address[l] = address[l];
    for (u32 k = 0; k < bytes / 4; k++) {
        std::memcpy(op.data[k], w.row(I.b + int(k)), sizeof op.data[k]);
        std::memcpy(op.data[bytes / 4 + k], w.row(I.c + int(k)), sizeof op.data[k]);
    }
    note_issue(w, I, &op);
}
OP(DS_WRITE2_B32) { write_two(w, I, 4, 1); }
OP(DS_WRITE2_B64) { write_two(w, I, 8, 1); }
OP(DS_WRITE2ST64_B32) { write_two(w, I, 4, 64); }
OP(DS_WRITE2ST64_B64) { write_two(w, I, 8, 64); }

// ---- atomics -----------------------------------------------------------------------------------------------------------------

template <class T, class F>
static void atomic(Wave& w, const Ins& I, bool result, F f) {
    drain_lds(w);
    constexpr int rows = sizeof(T) / 4;
    u32 address[LANES];
    const u32 *base = w.row(I.a), *one = w.row(I.b), *two = w.row(I.c);
    EACH_LANE address[l] = base[l] + u32(I.imm);
    for (u64 m = w.exec(); m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        if (address[l] & (sizeof(T) - 1)) throw Stop("misaligned", "LDS atomic of " + std::to_string(sizeof(T)) + " bytes", &w, l, address[l]);
        T old, x = one[l], y = two[l];
        if constexpr (rows == 2) {
            x |= T(one[LANES + l]) << 32;
            y |= T(two[LANES + l]) << 32;
        }
        lds_load(w, I, address[l], &old, sizeof(T), l);
        T now = f(old, x, y);
        lds_store(w, I, address[l], &now, sizeof(T), l);
        if (result) {
            w.row(I.dst)[l] = u32(old);
            if constexpr (rows == 2) w.row(I.dst + 1)[l] = u32(u64(old) >> 32);
        }
    }
    count(w, w.exec(), sizeof(T), true);
    count_conflicts(w, w.exec(), address, sizeof(T));
    w.machine->effect();
    note_issue(w, I, nullptr);
}
#define DS_ATOMIC(PLAIN, RETURNING, T, VALUE)                                                                        \
    static T value_##PLAIN([[maybe_unused]] T m, [[maybe_unused]] T x, [[maybe_unused]] T y) { return T(VALUE); }     \
    OP(PLAIN) { atomic<T>(w, I, false, value_##PLAIN); }                                                              \
    OP(RETURNING) { atomic<T>(w, I, true, value_##PLAIN); }
#define INTEGERS(BITS, T, S)                                                                                          \
    DS_ATOMIC(DS_ADD_U##BITS, DS_ADD_RTN_U##BITS, T, m + x)                                                           \
    DS_ATOMIC(DS_SUB_U##BITS, DS_SUB_RTN_U##BITS, T, m - x)                                                           \
    DS_ATOMIC(DS_RSUB_U##BITS, DS_RSUB_RTN_U##BITS, T, x - m)                                                         \
    DS_ATOMIC(DS_INC_U##BITS, DS_INC_RTN_U##BITS, T, m >= x ? 0 : m + 1)                                              \
    DS_ATOMIC(DS_DEC_U##BITS, DS_DEC_RTN_U##BITS, T, m == 0 || m > x ? x : m - 1)                                     \
    DS_ATOMIC(DS_MIN_I##BITS, DS_MIN_RTN_I##BITS, T, S(m) < S(x) ? m : x)                                             \
    DS_ATOMIC(DS_MAX_I##BITS, DS_MAX_RTN_I##BITS, T, S(m) > S(x) ? m : x)                                             \
    DS_ATOMIC(DS_MIN_U##BITS, DS_MIN_RTN_U##BITS, T, m < x ? m : x)                                                   \
    DS_ATOMIC(DS_MAX_U##BITS, DS_MAX_RTN_U##BITS, T, m > x ? m : x)                                                   \
    DS_ATOMIC(DS_AND_B##BITS, DS_AND_RTN_B##BITS, T, m & x)                                                           \
    DS_ATOMIC(DS_OR_B##BITS, DS_OR_RTN_B##BITS, T, m | x)                                                             \
    DS_ATOMIC(DS_XOR_B##BITS, DS_XOR_RTN_B##BITS, T, m ^ x)                                                           \
    DS_ATOMIC(DS_MSKOR_B##BITS, DS_MSKOR_RTN_B##BITS, T, (m & ~x) | y)                                                \
    DS_ATOMIC(DS_CMPST_B##BITS, DS_CMPST_RTN_B##BITS, T, m == x ? y : m)
INTEGERS(32, u32, i32)
INTEGERS(64, u64, i64)
DS_ATOMIC(DS_ADD_F32, DS_ADD_RTN_F32, u32, bits(real(m) + real(x)))
DS_ATOMIC(DS_MIN_F32, DS_MIN_RTN_F32, u32, bits(std::fmin(real(m), real(x))))
DS_ATOMIC(DS_MAX_F32, DS_MAX_RTN_F32, u32, bits(std::fmax(real(m), real(x))))
DS_ATOMIC(DS_ADD_F64, DS_ADD_RTN_F64, u64, bits64(real64(m) + real64(x)))
DS_ATOMIC(DS_MIN_F64, DS_MIN_RTN_F64, u64, bits64(std::fmin(real64(m), real64(x))))
DS_ATOMIC(DS_MAX_F64, DS_MAX_RTN_F64, u64, bits64(std::fmax(real64(m), real64(x))))
static u32 pair_sum(u32 a, u32 b, bool bf) {
    auto one = [bf](u32 x, u32 y) { return bf ? bf16_bits(bf16_real(x) + bf16_real(y)) : half_result(double(half_real(x)) + half_real(y)); };
    return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
DS_ATOMIC(DS_PK_ADD_F16, DS_PK_ADD_RTN_F16, u32, pair_sum(m, x, false))
DS_ATOMIC(DS_PK_ADD_BF16, DS_PK_ADD_RTN_BF16, u32, pair_sum(m, x, true))
OP(DS_WRXCHG_RTN_B32) { atomic<u32>(w, I, true, [](u32, u32 x, u32) { return x; }); }
OP(DS_WRXCHG_RTN_B64) { atomic<u64>(w, I, true, [](u64, u64 x, u64) { return x; }); }
OP(DS_NOP) {}

// ---- lane exchanges ------------------------------------------------------------------------------------------------------------

static void give(Wave& w, const Ins& I, const u32* r) {
    commit(w, I, I.dst, r);
    note_issue(w, I, nullptr);
}
OP(DS_BPERMUTE_B32) {
    Source A(w, I.a), B(w, I.b);
    u64 e = w.exec();
    alignas(64) u32 r[LANES];
    EACH_LANE {
        int from = int((A[l] + u32(I.imm)) >> 2 & 63);
        r[l] = (e >> from & 1) ? B[from] : 0;
    }
    give(w, I, r);
}
OP(DS_PERMUTE_B32) {
    Source A(w, I.a), B(w, I.b);
    alignas(64) u32 r[LANES] = {};
    for (u64 m = w.exec(); m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        r[(A[l] + u32(I.imm)) >> 2 & 63] = B[l];
    }
    give(w, I, r);
}
static int swizzle_source(u32 control, int l) {
    int low = l & 31, half = l & 32;
    if (control >= 0xc000) {  // rotate within the lanes that the mask leaves free
        int by = int(control >> 5 & 31), keep = int(control & 31);
        int moved = (control >> 10 & 1) ? low - by : low + by;
        return half | (low & keep) | (moved & 31 & ~keep);
    }
    if (control & 0x8000) return (l & ~3) | int(control >> (2 * (l & 3)) & 3);
    return half | (((low & int(control & 31)) | int(control >> 5 & 31)) ^ int(control >> 10 & 31));
}
OP(DS_SWIZZLE_B32) {
    u32 control = u32(I.imm) & 0xffff;
    if (control >= 0xe000) w.fail("unsupported", "the FFT mode of ds_swizzle");
    Source A(w, I.a);
    u64 e = w.exec();
    alignas(64) u32 r[LANES];
    EACH_LANE {
        int from = swizzle_source(control, l);
        r[l] = (e >> from & 1) ? A[from] : 0;
    }
    give(w, I, r);
}

}  // namespace gfx950
