// Scalar, global, flat and buffer memory: addresses, bounds, loads, stores, atomics, loads into LDS.
#include <algorithm>

#include "machine.h"
#include "numeric.h"

namespace gfx950 {

// ---- memory proper -------------------------------------------------------------------------------------------------------

Region* find_region(Wave& w, u64 address, u32 n, bool store) {
    Machine& m = *w.machine;
    Region* r = m.last_region;
    if (!r || address < r->low || address + n > r->high) {
        auto it = std::upper_bound(m.regions.begin(), m.regions.end(), address, [](u64 a, const Region& x) { return a < x.low; });
        if (it == m.regions.begin()) return nullptr;
        r = &*--it;
        if (address + n > r->high) return nullptr;
        m.last_region = r;
    }
    if (r->device >= 0 && r->device != w.group->device && !(r->flags & REGION_PEER)) return nullptr;
    if (store && (r->flags & REGION_READ_ONLY)) return nullptr;
    return r;
}
static Region& region_or_stop(Wave& w, u64 address, u32 n, bool store, int lane) {
    if (Region* r = find_region(w, address, n, store)) return *r;
    throw Stop("out of bounds", std::string(store ? "store" : "load") + " of " + std::to_string(n) + " bytes", &w, lane, address);
}
static void check_alignment(Wave& w, const Ins& I, u64 address, u32 n, int lane) {
    u32 need = n >= 4 ? 4 : n;
    if ((address & (need - 1)) && (w.machine->checks & CHECK_MISALIGNED)) w.machine->report(w, I, REPORT_MISALIGNED, lane, address);
}

void load_bytes(Wave& w, const Ins& I, u64 address, void* out, u32 n, int scope, int lane) {
    Region& r = region_or_stop(w, address, n, false, lane);
    check_alignment(w, I, address, n, lane);
    if (r.known && (w.machine->checks & CHECK_UNINITIALISED))
        for (u32 k = 0; k < n; k++)
            if (!r.known[address - r.low + k]) {
                w.machine->report(w, I, REPORT_UNINITIALISED_MEMORY, lane, address + k);
                break;
            }
    if (w.machine->weak() && !(r.flags & REGION_READ_ONLY)) w.machine->caches.read(w, r, address, static_cast<u8*>(out), n, scope);
    else std::memcpy(out, reinterpret_cast<void*>(address), n);
}
void store_bytes(Wave& w, const Ins& I, u64 address, const void* in, u32 n, int scope, int lane) {
    Region& r = region_or_stop(w, address, n, true, lane);
    check_alignment(w, I, address, n, lane);
    if (r.known) std::memset(r.known + (address - r.low), 1, n);
    if (w.machine->weak()) w.machine->caches.write(w, r, address, static_cast<const u8*>(in), n, scope);
    else std::memcpy(reinterpret_cast<void*>(address), in, n);
}

// ---- scalar loads ----------------------------------------------------------------------------------------------------------

static void scalar_load(Wave& w, const Ins& I, u64 address, i64 limit) {
    u32 n = u32(I.count);
    w.machine->count(w, SPACE_SCALAR, SCOPE_WAVE, false, 4 * n);
    if (address & 3) w.machine->report(w, I, REPORT_MISALIGNED, -1, address);
    address &= ~u64(3);
    for (u32 k = 0; k < n; k++) {
        u32 x = 0;
        if (limit < 0 || i64(4 * k + 4) <= limit) load_bytes(w, I, address + 4 * k, &x, 4, SCOPE_WAVE, -1);
        w.s[I.dst + int(k)] = x;
    }
    note_load(w, I, address, w.s[I.dst]);
    note_issue(w, I, nullptr);
}
static u32 scalar_offset(const Wave& w, const Ins& I) { return u32(I.imm) + (I.b >= 0 ? w.s[I.b] : 0); }
OP(S_LOAD) { scalar_load(w, I, w.s64(I.a) + u64(i64(I.imm)) + (I.b >= 0 ? w.s[I.b] : 0), -1); }
OP(S_BUFFER_LOAD) {
    u64 base = w.s64(I.a) & 0xffffffffffffull;
    u32 stride = w.s[I.a + 1] >> 16 & 0x3fff, records = w.s[I.a + 2], offset = scalar_offset(w, I) & ~3u;
    i64 bytes = stride ? i64(stride) * records : i64(records);
    scalar_load(w, I, base + offset, std::max<i64>(0, bytes - offset));
}
static void clock_read(Wave& w, const Ins& I, u64 t) {
    w.set_s64(I.dst, t);
    w.read_clock = true;
    note_issue(w, I, nullptr);
}
OP(S_MEMREALTIME) { clock_read(w, I, w.machine->clock); }
OP(S_MEMTIME) { clock_read(w, I, w.machine->clock * 21); }  // 2.1 GHz core clock against the 100 MHz counter
OP(S_DCACHE_INV) { note_issue(w, I, nullptr); }
OP(S_DCACHE_WB) { note_issue(w, I, nullptr); }

// ---- addresses ---------------------------------------------------------------------------------------------------------------

constexpr u64 LDS_APERTURE = u64(1) << 48;  // flat addresses of LDS: core.h's SRC_SHARED_BASE holds the same

static void bounds(MemOp& op) {
    op.low = ~u64(0);
    op.high = 0;
    u32 bytes = op.size * std::max<u32>(1, op.step);
    if (op.lanes == ALL) {
        u64 low = op.low, high = 0;
        EACH_LANE {
            low = std::min(low, op.address[l]);
            high = std::max(high, op.address[l]);
        }
        op.low = low;
        op.high = high + bytes;
        return;
    }
    for (u64 m = op.lanes; m; m &= m - 1) {
        u64 a = op.address[__builtin_ctzll(m)];
        op.low = std::min(op.low, a);
        op.high = std::max(op.high, a + bytes);
    }
}
static void global_address(Wave& w, const Ins& I, MemOp& op) {
    const u32* a = w.row(I.a);
    op.lanes = w.exec();
    if (I.flags & F_SADDR) {
        u64 base = w.s64(I.c) + u64(i64(I.imm));
        if (I.x1) EACH_LANE op.address[l] = base;  // no vector address at all
        else EACH_LANE op.address[l] = base + a[l];
    } else {
        EACH_LANE op.address[l] = (u64(a[l]) | u64(a[LANES + l]) << 32) + u64(i64(I.imm));
    }
}
static void buffer_address(Wave& w, const Ins& I, MemOp& op) {
    const u32* words = w.s + I.b;
    u64 base = u64(words[0]) | u64(words[1] & 0xffff) << 32;
    u32 stride = words[1] >> 16 & 0x3fff, records = words[2], scalar = w.s[I.c];
    if (words[1] >> 31) w.fail("unsupported", "a swizzled buffer resource");
    if (words[3] >> 23 & 1) w.fail("unsupported", "a buffer resource that adds the thread id");
    bool indexed = I.flags & F_IDXEN, offset = I.flags & F_OFFEN;
    const u32 *index = w.row(I.a), *extra = w.row(I.a + (indexed ? 1 : 0));
    op.lanes = w.exec();
    u32 step = std::max<u32>(1, op.step);
    if (!stride) {  // most are raw buffers that no lane leaves
        u32 last = 0;
        EACH_LANE {
            u32 o = (offset ? extra[l] : 0) + u32(I.imm);
            last = std::max(last, o);
            op.address[l] = base + scalar + o;
        }
        if (u64(last) + scalar + u64(op.size) * step <= records) return;
    }
    EACH_LANE {
        u32 i = indexed ? index[l] : 0, o = (offset ? extra[l] : 0) + u32(I.imm);
        op.address[l] = base + scalar + o + u64(stride) * i;
        for (u32 k = 0; k < step; k++) {
            // Raw buffers are bounded in bytes, each dword by itself; structured ones in records.
            bool inside = stride == 0 ? u64(o) + scalar + u64(op.size) * (k + 1) <= records
                                      : i < records && u64(o) + u64(op.size) * (k + 1) <= std::max<u64>(stride, 1);
            if (!inside) op.zero[k] |= u64(1) << l;
        }
    }
}
enum class Where { Global, Buffer };
static void addresses(Wave& w, const Ins& I, MemOp& op, Where where) {
    for (u64& z : op.zero) z = 0;
    where == Where::Global ? global_address(w, I, op) : buffer_address(w, I, op);
    bounds(op);
}
static bool in_lds(u64 address) { return address >> 48 == 1; }

// ---- loads -------------------------------------------------------------------------------------------------------------------

enum class Part { Whole, Low, High };  // D16: into one half of the register
struct LoadKind {
    u32 bytes;
    bool extend;
    Part part;
};
static u32 widen(const LoadKind& k, u32 x) {
    if (!k.extend) return x;
    return k.bytes == 1 ? u32(i32(i8(x))) : u32(i32(i16(x)));
}
static void place_result(Wave& w, int row, int l, Part part, u32 x) {
    u32& d = w.row(row)[l];
    if (part == Part::Whole) d = x;
    else if (part == Part::Low) d = (d & 0xffff0000u) | (x & 0xffff);
    else d = (d & 0xffff) | x << 16;
}
void lds_store(Wave& w, const Ins& I, u32 address, const void* in, u32 n, int lane);
void lds_load(Wave& w, const Ins& I, u32 address, void* out, u32 n, int lane);

// A whole number of dwords a lane: one access when every dword is inside.
static void fetch(Wave& w, const Ins& I, const MemOp& op, int l, u32* x, int scope) {
    u32 step = std::max<u32>(1, op.step);
    u64 any = op.zero[0] | op.zero[1] | op.zero[2] | op.zero[3];
    if (!(any >> l & 1)) {
        if (in_lds(op.address[l]) && (I.flags & F_FLAT)) lds_load(w, I, u32(op.address[l]), x, op.size * step, l);
        else load_bytes(w, I, op.address[l], x, op.size * step, scope, l);
        return;
    }
    for (u32 k = 0; k < step; k++)
        if (!(op.zero[k] >> l & 1)) load_bytes(w, I, op.address[l] + 4 * k, x + k, op.size, scope, l);
}
// The region that holds all lanes' dwords, when no lane needs a look of its own.
static Region* whole_region(Wave& w, const MemOp& op, bool store) {
    if ((op.zero[0] | op.zero[1] | op.zero[2] | op.zero[3]) || (op.ins->flags & F_FLAT) || op.high - op.low > (1u << 30)) return nullptr;
    u64 low_bits = 0;
    EACH_LANE low_bits |= op.address[l];
    if (op.size != 4 || (low_bits & 3)) return nullptr;
    Region* r = find_region(w, op.low, u32(op.high - op.low), store);
    return r && !r->known ? r : nullptr;
}
// Whether all lanes are active and each begins where the one before it ends.
static bool in_one_piece(const MemOp& op, u32 step) {
    if (op.lanes != ALL || op.high - op.low != u64(LANES) * 4 * step) return false;
    u64 off = 0;
    EACH_LANE off |= op.address[l] ^ (op.low + u64(4) * step * u64(l));
    return !off;
}
// STEP dwords a lane, one lane behind the other, to rows and from rows.
template <u32 STEP>
static void split(const u32* piece, u32* rows) {
    for (u32 k = 0; k < STEP; k++) EACH_LANE rows[k * LANES + u32(l)] = piece[u32(l) * STEP + k];
}
template <u32 STEP>
static void join(const u32* rows, u32* piece) {
    EACH_LANE for (u32 k = 0; k < STEP; k++) piece[u32(l) * STEP + k] = rows[k * LANES + u32(l)];
}
static constexpr void (*SPLIT[])(const u32*, u32*) = {nullptr, split<1>, split<2>, split<3>, split<4>};
static constexpr void (*JOIN[])(const u32*, u32*) = {nullptr, join<1>, join<2>, join<3>, join<4>};
// Dwords through the caches; neighbouring lanes share the look at their line.
static void load_weak(Wave& w, MemOp& op, Region& r, int scope) {
    const Ins& I = *op.ins;
    Caches& caches = w.machine->caches;
    u32 step = std::max<u32>(1, op.step);
    u64 line = ~u64(0);
    bool direct = false;
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u64 a = op.address[l];
        u32 x[4] = {0, 0, 0, 0};
        if (a / LINE != line) {
            line = a / LINE;
            direct = (r.flags & REGION_READ_ONLY) || caches.direct(w, r, line, scope);
        }
        if (direct && (a + 4 * step - 1) / LINE == line) std::memcpy(x, reinterpret_cast<void*>(a), 4 * step);
        else caches.read(w, r, a, reinterpret_cast<u8*>(x), 4 * step, scope);
        for (u32 k = 0; k < step; k++) w.row(I.dst + int(k))[l] = x[k];
    }
    int first = __builtin_ctzll(op.lanes);
    note_load(w, I, op.address[first], w.row(I.dst)[first]);
}
// Dwords into the caches; lanes that follow one another in memory go in one piece a line.
static void store_weak(Wave& w, MemOp& op, Region& r, int scope) {
    u32 step = std::max<u32>(1, op.step), held = 0;
    u8 piece[2 * LINE];
    u64 start = 0;
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u64 a = op.address[l];
        if (held && (a != start + held || held + 4 * step > LINE)) {
            w.machine->caches.write(w, r, start, piece, held, scope);
            held = 0;
        }
        if (!held) start = a;
        for (u32 k = 0; k < step; k++) std::memcpy(piece + held + 4 * k, &op.data[k][l], 4);
        held += 4 * step;
    }
    if (held) w.machine->caches.write(w, r, start, piece, held, scope);
}
template <int BYTES, bool EXTEND, int PART>
static void perform_load(Wave& w, MemOp& op) {
    const Ins& I = *op.ins;
    constexpr LoadKind kind{BYTES, EXTEND, Part(PART)};
    int scope = scope_of(I);
    u32 step = std::max<u32>(1, op.step), lanes = u32(__builtin_popcountll(op.lanes));
    w.machine->count(w, SPACE_GLOBAL, scope, false, u64(lanes) * op.size * step);
    if (!w.machine->weak() && BYTES == 4 && op.lanes) {
        if (whole_region(w, op, false)) {
            if (in_one_piece(op, step)) {
                SPLIT[step](reinterpret_cast<const u32*>(op.low), w.row(I.dst));
            } else {
                for (u64 m = op.lanes; m; m &= m - 1) {
                    int l = __builtin_ctzll(m);
                    const u32* p = reinterpret_cast<const u32*>(op.address[l]);
                    for (u32 k = 0; k < step; k++) w.row(I.dst + int(k))[l] = p[k];
                }
            }
            int first = __builtin_ctzll(op.lanes);
            note_load(w, I, op.address[first], w.row(I.dst)[first]);
            return;
        }
    }
    if (w.machine->weak() && BYTES == 4 && op.lanes)
        if (Region* r = whole_region(w, op, false)) return load_weak(w, op, *r, scope);
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[4] = {0, 0, 0, 0};
        fetch(w, I, op, l, x, scope);
        if (m == op.lanes) note_load(w, I, op.address[l], x[0]);
        for (u32 k = 0; k < step; k++) place_result(w, I.dst + int(k), l, kind.part, widen(kind, x[k]));
    }
}
// Into LDS: M0 plus the instruction's offset plus the lane's slot.
template <int BYTES, bool EXTEND>
static void perform_lds_load(Wave& w, MemOp& op) {
    const Ins& I = *op.ins;
    int scope = scope_of(I);
    u32 slot = op.slot();
    w.machine->count(w, SPACE_GLOBAL, scope, false, u64(__builtin_popcountll(op.lanes)) * op.size * std::max<u32>(1, op.step));
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[4] = {0, 0, 0, 0};
        fetch(w, I, op, l, x, scope);
        x[0] = widen(LoadKind{BYTES, EXTEND, Part::Whole}, x[0]);
        lds_store(w, I, op.lds_base + u32(l) * slot, x, slot, l);
    }
    w.machine->effect();
}
template <int BYTES, bool EXTEND, int PART>
static void load(Wave& w, const Ins& I, Where where) {
    MemOp op;
    op.ins = &I;
    op.size = BYTES;
    op.step = BYTES == 4 ? u32(I.count) : 1;
    op.perform = perform_load<BYTES, EXTEND, PART>;
    addresses(w, I, op, where);
    if (I.flags & F_LDS) {
        op.lds = true;
        op.lds_base = w.s[M0] + u32(I.imm);
        op.perform = perform_lds_load<BYTES, EXTEND>;
    }
    submit(w, op);
}
#define LOADS(NAME, BYTES, EXTEND, PART)                                                     \
    OP(GLOBAL_LOAD_##NAME) { load<BYTES, EXTEND, int(PART)>(w, I, Where::Global); }          \
    OP(BUFFER_LOAD_##NAME) { load<BYTES, EXTEND, int(PART)>(w, I, Where::Buffer); }
LOADS(DWORD, 4, false, Part::Whole)
LOADS(UBYTE, 1, false, Part::Whole)
LOADS(SBYTE, 1, true, Part::Whole)
LOADS(USHORT, 2, false, Part::Whole)
LOADS(SSHORT, 2, true, Part::Whole)
LOADS(UBYTE_D16, 1, false, Part::Low)
LOADS(UBYTE_D16_HI, 1, false, Part::High)
LOADS(SBYTE_D16, 1, true, Part::Low)
LOADS(SBYTE_D16_HI, 1, true, Part::High)
LOADS(SHORT_D16, 2, false, Part::Low)
LOADS(SHORT_D16_HI, 2, false, Part::High)

// ---- stores ------------------------------------------------------------------------------------------------------------------

static void perform_store(Wave& w, MemOp& op) {
    const Ins& I = *op.ins;
    int scope = scope_of(I);
    u32 step = std::max<u32>(1, op.step);
    w.machine->count(w, SPACE_GLOBAL, scope, true, u64(__builtin_popcountll(op.lanes)) * op.size * step);
    u64 any = op.zero[0] | op.zero[1] | op.zero[2] | op.zero[3];
    w.machine->effect();
    if (!w.machine->weak() && op.lanes && whole_region(w, op, true)) {
        if (in_one_piece(op, step)) return JOIN[step](op.data[0], reinterpret_cast<u32*>(op.low));
        for (u64 m = op.lanes; m; m &= m - 1) {
            int l = __builtin_ctzll(m);
            u32* p = reinterpret_cast<u32*>(op.address[l]);
            for (u32 k = 0; k < step; k++) p[k] = op.data[k][l];
        }
        return;
    }
    if (w.machine->weak() && op.lanes)
        if (Region* r = whole_region(w, op, true)) return store_weak(w, op, *r, scope);
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        u32 x[4];
        for (u32 k = 0; k < step; k++) x[k] = op.data[k][l];
        if (in_lds(op.address[l]) && (I.flags & F_FLAT)) {
            lds_store(w, I, u32(op.address[l]), x, op.size * step, l);
        } else if (!(any >> l & 1)) {
            store_bytes(w, I, op.address[l], x, op.size * step, scope, l);
        } else {
            for (u32 k = 0; k < step; k++)
                if (!(op.zero[k] >> l & 1)) store_bytes(w, I, op.address[l] + 4 * k, x + k, op.size, scope, l);
        }
    }
}
static void store(Wave& w, const Ins& I, u32 bytes, bool high, Where where, int from) {
    MemOp op;
    op.ins = &I;
    op.size = bytes;
    op.step = bytes == 4 ? u32(I.count) : 1;
    op.store = true;
    op.perform = perform_store;
    addresses(w, I, op, where);
    for (u32 k = 0; k < op.step; k++) {
        std::memcpy(op.data[k], w.row(from + int(k)), sizeof op.data[k]);
        if (high) EACH_LANE op.data[k][l] >>= 16;
    }
    submit(w, op);
}
#define STORES(NAME, BYTES, HIGH)                                                  \
    OP(GLOBAL_STORE_##NAME) { store(w, I, BYTES, HIGH, Where::Global, I.b); }      \
    OP(BUFFER_STORE_##NAME) { store(w, I, BYTES, HIGH, Where::Buffer, I.dst); }
STORES(DWORD, 4, false)
STORES(SHORT, 2, false)
STORES(SHORT_D16_HI, 2, true)
STORES(BYTE, 1, false)
STORES(BYTE_D16_HI, 1, true)

static void perform_write_back(Wave& w, MemOp& op) {
    if (!w.machine->weak()) return;
    settle_vector(w);  // it stands behind the wave's earlier stores
    w.machine->caches.write_back(w.group->device, w.group->xcd, scope_of(*op.ins));
}
OP(BUFFER_WBL2) {
    MemOp op;
    op.ins = &I;
    op.perform = perform_write_back;
    submit(w, op);
}
OP(BUFFER_INV) {
    if (w.machine->weak()) w.machine->caches.invalidate(w.group->device, w.group->xcd, scope_of(I));
}

// ---- atomics -----------------------------------------------------------------------------------------------------------------

static u32 add_halves(u32 a, u32 b, bool bf) {
    auto one = [bf](u32 x, u32 y) { return bf ? bf16_bits(bf16_real(x) + bf16_real(y)) : half_result(double(half_real(x)) + half_real(y)); };
    return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
enum class Combine { Swap, CompareSwap, Add, Sub, SMin, UMin, SMax, UMax, And, Or, Xor, Inc, Dec, AddFloat, MinFloat, MaxFloat, AddHalf, AddBf16 };
template <class T>
static T combined(Combine how, T old, T x, T compare) {
    using S = std::make_signed_t<T>;
    switch (how) {
        case Combine::Swap: return x;
        case Combine::CompareSwap: return old == compare ? x : old;
        case Combine::Add: return old + x;
        case Combine::Sub: return old - x;
        case Combine::SMin: return S(old) < S(x) ? old : x;
        case Combine::UMin: return old < x ? old : x;
        case Combine::SMax: return S(old) > S(x) ? old : x;
        case Combine::UMax: return old > x ? old : x;
        case Combine::And: return old & x;
        case Combine::Or: return old | x;
        case Combine::Xor: return old ^ x;
        case Combine::Inc: return old >= x ? 0 : old + 1;
        case Combine::Dec: return old == 0 || old > x ? x : old - 1;
        default: break;
    }
    if constexpr (sizeof(T) == 4) {
        if (how == Combine::AddFloat) return bits(real(old) + real(x));
        return add_halves(old, x, how == Combine::AddBf16);
    } else {
        double a = real64(old), b = real64(x);
        return bits64(how == Combine::AddFloat ? a + b : how == Combine::MinFloat ? std::fmin(a, b) : std::fmax(a, b));
    }
}
template <class T, Combine HOW>
static void perform_atomic(Wave& w, MemOp& op) {
    const Ins& I = *op.ins;
    int scope = scope_of(I, true);
    constexpr int rows = sizeof(T) / 4;
    w.machine->count(w, SPACE_GLOBAL, scope, true, u64(__builtin_popcountll(op.lanes)) * sizeof(T));
    bool changed = false;
    for (u64 m = op.lanes; m; m &= m - 1) {
        int l = __builtin_ctzll(m);
        if (op.zero[0] >> l & 1) continue;
        u64 a = op.address[l];
        Region& r = region_or_stop(w, a, sizeof(T), true, l);
        if (a & (sizeof(T) - 1)) throw Stop("misaligned", "atomic of " + std::to_string(sizeof(T)) + " bytes", &w, l, a);
        void* p = w.machine->weak() ? static_cast<void*>(w.machine->caches.atomic_place(w, r, a, sizeof(T), scope)) : reinterpret_cast<void*>(a);
        if (r.known) std::memset(r.known + (a - r.low), 1, sizeof(T));
        T old, x = op.data[0][l], compare = 0;
        std::memcpy(&old, p, sizeof(T));
        if constexpr (rows == 2) x |= T(op.data[1][l]) << 32;
        if constexpr (HOW == Combine::CompareSwap) {
            compare = op.data[rows][l];
            if constexpr (rows == 2) compare |= T(op.data[3][l]) << 32;
        }
        T now = combined<T>(HOW, old, x, compare);
        std::memcpy(p, &now, sizeof(T));
        changed |= now != old;
        if (m == op.lanes) note_load(w, I, a, u32(old));
        if (I.flags & F_RETURN) {
            w.row(I.dst)[l] = u32(old);
            if constexpr (rows == 2) w.row(I.dst + 1)[l] = u32(old >> 32);
        }
    }
    if (changed) w.machine->effect();
}
template <class T, Combine HOW>
static void atomic(Wave& w, const Ins& I, Where where, int from) {
    MemOp op;
    op.ins = &I;
    op.size = sizeof(T);
    op.step = 1;
    op.store = true;
    op.perform = perform_atomic<T, HOW>;
    addresses(w, I, op, where);
    if (I.flags & F_FLAT)
        for (u64 m = op.lanes; m; m &= m - 1)
            if (in_lds(op.address[__builtin_ctzll(m)])) w.fail("unsupported", "a flat atomic on LDS");
    constexpr int rows = int(sizeof(T) / 4) * (HOW == Combine::CompareSwap ? 2 : 1);
    for (int k = 0; k < rows; k++) std::memcpy(op.data[k], w.row(from + k), sizeof op.data[k]);
    submit(w, op);
}
#define ATOMIC(NAME, TYPE, HOW)                                                                          \
    OP(GLOBAL_ATOMIC_##NAME) { atomic<TYPE, Combine::HOW>(w, I, Where::Global, I.b); }                   \
    OP(BUFFER_ATOMIC_##NAME) { atomic<TYPE, Combine::HOW>(w, I, Where::Buffer, I.dst); }
#define ATOMIC_BOTH(NAME, HOW) ATOMIC(NAME, u32, HOW) ATOMIC(NAME##_X2, u64, HOW)
ATOMIC_BOTH(SWAP, Swap)
ATOMIC_BOTH(CMPSWAP, CompareSwap)
ATOMIC_BOTH(ADD, Add)
ATOMIC_BOTH(SUB, Sub)
ATOMIC_BOTH(SMIN, SMin)
ATOMIC_BOTH(UMIN, UMin)
ATOMIC_BOTH(SMAX, SMax)
ATOMIC_BOTH(UMAX, UMax)
ATOMIC_BOTH(AND, And)
ATOMIC_BOTH(OR, Or)
ATOMIC_BOTH(XOR, Xor)
ATOMIC_BOTH(INC, Inc)
ATOMIC_BOTH(DEC, Dec)
ATOMIC(ADD_F32, u32, AddFloat)
ATOMIC(PK_ADD_F16, u32, AddHalf)
ATOMIC(PK_ADD_BF16, u32, AddBf16)
ATOMIC(ADD_F64, u64, AddFloat)
ATOMIC(MIN_F64, u64, MinFloat)
ATOMIC(MAX_F64, u64, MaxFloat)

}  // namespace gfx950
