// What one wave is, how an instruction names its operands, and how results are written back.
//
// A vector register is a row of 64 words. Scalar registers, inline constants and literals live in one array per wave
// (`s`), so that a scalar operand is one index: 0..127 registers, 128..255 constants, 256.. literals of the program.
// Vector registers are numbered from VECTOR upwards; accumulation registers are the rows behind the ordinary ones.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace gfx950 {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 64;
constexpr int VECTOR = 0x1000;
constexpr u64 ALL = ~u64(0);
enum ScalarIndex { VCC = 106, M0 = 124, EXEC = 126, SRC_SHARED_BASE = 235, SRC_VCCZ = 251, SRC_EXECZ, SRC_SCC, FIRST_LITERAL = 256 };

// Bits of Ins::flags, shared with lower.py.
enum Flag : u32 {
    F_DPP = 1, F_SDWA = 2, F_LDS = 4, F_OFFEN = 8, F_IDXEN = 16, F_SADDR = 32, F_RETURN = 64,
    F_SC0 = 128, F_SC1 = 256, F_NT = 512, F_VMEM = 1024, F_DS = 2048, F_SMEM = 4096, F_FLAT = 8192, F_SDWA_SDST = 16384,
};

struct Wave;
struct Ins;
using Handler = void (*)(Wave&, const Ins&);

// One lowered instruction. lower.py fills the same fields in the same order.
struct Record {
    i32 op, dst, dst2, a, b, c;
    u32 neg, abs, opsel, opsel_hi, neg_hi;
    i32 clamp, omod, imm, imm2, target;
    u32 dpp, dpp_mask, sdwa, flags;
    i32 pc, count, x0, x1;
    u32 vread[16], vwrite[16], sread[4], swrite[4];  // registers touched, one bit each
};

struct Ins : Record {
    Handler run;
};

// A set of vector registers; 512 bits, tested against an instruction's own sets before it runs.
struct RegisterSet {
    u64 word[8];
    void clear() { std::memset(word, 0, sizeof word); }
    bool meets(const u32* other) const {
        u64 o[8], hit = 0;
        std::memcpy(o, other, sizeof o);
        for (int i = 0; i < 8; i++) hit |= word[i] & o[i];
        return hit != 0;
    }
    bool empty() const {
        u64 any = 0;
        for (int i = 0; i < 8; i++) any |= word[i];
        return !any;
    }
    bool lacks(const u32* other) const {
        u64 o[8], hit = 0;
        std::memcpy(o, other, sizeof o);
        for (int i = 0; i < 8; i++) hit |= ~word[i] & o[i];
        return hit != 0;
    }
    void add(const u32* other) {
        u64 o[8];
        std::memcpy(o, other, sizeof o);
        for (int i = 0; i < 8; i++) word[i] |= o[i];
    }
};

// One word of ones or zeros for each bit.
inline void expand(u64 bits, u32* mask) {
    u32 low = u32(bits), high = u32(bits >> 32);
    for (int l = 0; l < 32; l++) {
        mask[l] = u32(0) - (low >> l & 1);
        mask[32 + l] = u32(0) - (high >> l & 1);
    }
}

enum class State : i32 { Running, Barrier, Done };

struct Group;
struct Machine;

struct Pending;  // memory operations issued and not yet known to be done: pending.h

// Loads since one that brought something new, as hashes. Forgets all when three quarters are in use.
struct Seen {
    u32 keys[128] = {};
    u32 count = 0;
    bool add(u64 load) {  // whether it is new
        u32 key = u32(load * 0x9e3779b97f4a7c15ull >> 32) | 1;
        for (u32 at = key >> 25;; at = (at + 1) & 127) {
            if (keys[at] == key) return false;
            if (keys[at]) continue;
            if (++count > 96) {
                *this = {};
                return add(load);
            }
            keys[at] = key;
            return true;
        }
    }
};

struct Wave {
    u32* v = nullptr;
    u32* s = nullptr;
    Group* group = nullptr;
    Machine* machine = nullptr;
    const Ins* program = nullptr;
    i32 pc = 0, next = 0, id = 0;
    State state = State::Running;
    bool yield = false, outstanding = false;
    u32 scc = 0, mode = 0;
    bool flush32 = false, flush16 = false, ieee = false, fp16_ovfl = false;
    u64 executed = 0, sleep_until = 0;
    u64 dpp_lanes = ALL;          // lanes that the DPP control of the running instruction lets through
    u64 mask_of = 0;              // exec that `mask` was made from
    alignas(64) u32 mask[LANES];  // all ones where the lane is active
    RegisterSet busy, known;      // vector registers with a load outstanding; registers written at least once
    u64 busy_s[2] = {0, 0};
    Pending* pending = nullptr;
    u32 unsettled = 0;            // operations in `pending` that have not happened yet
    const Ins* performing = nullptr;  // whose delayed operation happens now
    const Ins& culprit() const;   // the instruction that a fault is to be laid to
    // what the wave last waited for: filled by loads, read by the deadlock report
    u64 last_address = 0;
    u32 repeats = 0, last_value = 0;
    i32 last_load_pc = -1;
    Seen seen;
    bool read_clock = false;

    u64 s64(int i) const { return u64(s[i]) | u64(s[i + 1]) << 32; }
    void set_s64(int i, u64 x) {
        s[i] = u32(x);
        s[i + 1] = u32(x >> 32);
    }
    u64 exec() const { return s64(EXEC); }
    u32* row(int r) const { return v + size_t(r - VECTOR) * LANES; }
    void refresh_mask() {
        u64 e = exec();
        if (e == mask_of) return;
        mask_of = e;
        expand(e, mask);
    }
    void apply_mode();
    [[noreturn]] void fail(const char* kind, const std::string& text) const;
};

// ---- sources -------------------------------------------------------------------------------------------------------

inline u32 bits(float f) {
    u32 x;
    std::memcpy(&x, &f, 4);
    return x;
}
inline float real(u32 x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline u64 bits64(double f) {
    u64 x;
    std::memcpy(&x, &f, 8);
    return x;
}
inline double real64(u64 x) {
    double f;
    std::memcpy(&f, &x, 8);
    return f;
}

const u32* routed(Wave& w, const Ins& I, int k, const u32* plain, u32* buffer);  // operands.cpp: DPP and SDWA

inline int operand(const Ins& I, int k) { return k == 0 ? I.a : k == 1 ? I.b : I.c; }

// The 64 words of source k: a register row in place, or a scalar spread over a buffer.
struct Source {
    alignas(64) u32 buffer[LANES];
    const u32* p;
    Source(Wave& w, const Ins& I, int k) : Source(w, I, k, operand(I, k)) {}
    Source(Wave& w, const Ins& I, int k, int index) : Source(w, index) {
        if (I.flags & (F_DPP | F_SDWA)) p = routed(w, I, k, p, buffer);
    }
    Source(Wave& w, int index) {
        if (index >= VECTOR) {
            p = w.row(index);
        } else {
            u32 x = w.s[index];
            for (int l = 0; l < LANES; l++) buffer[l] = x;
            p = buffer;
        }
    }
    u32 operator[](int l) const { return p[l]; }
};

// As Source, with the float modifiers of a 32-bit operand (absolute, negate, flush of denormals).
struct SourceF32 {
    alignas(64) u32 buffer[LANES];
    const u32* p;
    SourceF32(Wave& w, const Ins& I, int k) {
        int index = operand(I, k);
        if (index >= VECTOR) {
            p = w.row(index);
        } else {
            u32 x = w.s[index];
            for (int l = 0; l < LANES; l++) buffer[l] = x;
            p = buffer;
        }
        if (I.flags & (F_DPP | F_SDWA)) p = routed(w, I, k, p, buffer);
        u32 keep = (I.abs >> k & 1) ? 0x7fffffffu : ~0u, flip = (I.neg >> k & 1) ? 0x80000000u : 0;
        if (keep != ~0u || flip || w.flush32) {
            for (int l = 0; l < LANES; l++) {
                u32 x = p[l];
                if (w.flush32 && !(x & 0x7f800000u)) x &= 0x80000000u;
                buffer[l] = (x & keep) ^ flip;
            }
            p = buffer;
        }
    }
    float operator[](int l) const { return real(p[l]); }
    u32 raw(int l) const { return p[l]; }
};

// 64-bit operands: a pair of rows, or a pair in the scalar array (64-bit constants are literals there).
struct Source64 {
    Source low, high;
    Source64(Wave& w, const Ins& I, int k) : low(w, I, k, operand(I, k)), high(w, I, k, operand(I, k) + 1) {}
    Source64(Wave& w, int index) : low(w, index), high(w, index + 1) {}
    u64 operator[](int l) const { return u64(low[l]) | u64(high[l]) << 32; }
};

struct SourceF64 {
    Source64 pair;
    u64 keep, flip;
    SourceF64(Wave& w, const Ins& I, int k)
        : pair(w, I, k), keep((I.abs >> k & 1) ? ~(u64(1) << 63) : ALL), flip(u64(I.neg >> k & 1) << 63) {}
    double operator[](int l) const { return real64((pair[l] & keep) ^ flip); }
    u64 raw(int l) const { return (pair[l] & keep) ^ flip; }
};

// 16-bit operands: op_sel picks the half.
struct Source16 {
    Source full;
    u32 shift, keep, flip;
    Source16(Wave& w, const Ins& I, int k, bool is_float)
        : full(w, I, k), shift((I.flags & F_SDWA) ? 0 : (I.opsel >> k & 1) * 16),
          keep(is_float && (I.abs >> k & 1) ? 0x7fff : 0xffff), flip(is_float && (I.neg >> k & 1) ? 0x8000 : 0) {}
    u32 operator[](int l) const { return ((full[l] >> shift) & keep) ^ flip; }
};

// ---- results -------------------------------------------------------------------------------------------------------

void commit_routed(Wave& w, const Ins& I, int row, const u32* r);  // operands.cpp

inline void commit(Wave& w, const Ins& I, int row, const u32* r) {
    if (I.flags & (F_DPP | F_SDWA)) return commit_routed(w, I, row, r);
    u32* d = w.row(row);
    if (w.exec() == ALL) {
        std::memcpy(d, r, sizeof(u32) * LANES);
        return;
    }
    w.refresh_mask();
    for (int l = 0; l < LANES; l++) d[l] = (r[l] & w.mask[l]) | (d[l] & ~w.mask[l]);
}
inline void commit(Wave& w, const Ins& I, const u32* r) { commit(w, I, I.dst, r); }

inline u64 active(const Wave& w, const Ins& I) { return (I.flags & F_DPP) ? w.exec() & w.dpp_lanes : w.exec(); }

inline void output_modifiers(const Wave& w, const Ins& I, u32* r) {
    if (I.omod) {
        float k = I.omod == 1 ? 2.f : I.omod == 2 ? 4.f : 0.5f;
        for (int l = 0; l < LANES; l++) r[l] = bits(real(r[l]) * k);
    }
    if (I.clamp)
        for (int l = 0; l < LANES; l++) {
            float f = real(r[l]);
            r[l] = bits(f > 1.f ? 1.f : (f > 0.f ? f : 0.f));  // NaN becomes 0, as DX10_CLAMP asks
        }
    if (w.flush32)
        for (int l = 0; l < LANES; l++)
            if (!(r[l] & 0x7f800000u)) r[l] &= 0x80000000u;
}
inline void commit_f32(Wave& w, const Ins& I, u32* r) {
    if (I.omod | I.clamp | i32(w.flush32)) output_modifiers(w, I, r);
    commit(w, I, I.dst, r);
}
// A 16-bit result: into the half that op_sel names (the other half stays), or low with the high half cleared.
inline void commit_16(Wave& w, const Ins& I, u32* r) {
    if (!(I.flags & F_SDWA) && (I.opsel >> 3 & 1)) {
        const u32* old = w.row(I.dst);
        for (int l = 0; l < LANES; l++) r[l] = (old[l] & 0xffff) | r[l] << 16;
    } else {
        for (int l = 0; l < LANES; l++) r[l] &= 0xffff;
    }
    commit(w, I, I.dst, r);
}
inline void commit_64(Wave& w, const Ins& I, const u64* r) {
    alignas(64) u32 low[LANES], high[LANES];
    for (int l = 0; l < LANES; l++) {
        low[l] = u32(r[l]);
        high[l] = u32(r[l] >> 32);
    }
    commit(w, I, I.dst, low);
    commit(w, I, I.dst + 1, high);
}
// A lane mask: inactive lanes read 0.
inline void commit_mask(Wave& w, const Ins& I, int index, u64 m) { w.set_s64(index, m & active(w, I)); }

// ---- registry ------------------------------------------------------------------------------------------------------

struct Registry {
    struct Entry {
        const char* name;
        Handler run;
    };
    static std::vector<Entry>& all() {
        static std::vector<Entry> entries;
        return entries;
    }
    Registry(const char* name, Handler run) { all().push_back({name, run}); }
};

// OP(V_NAME) { body using w and I }
#define OP(NAME)                                   \
    static void op_##NAME(Wave& w, const Ins& I);  \
    static Registry reg_##NAME(#NAME, op_##NAME);  \
    static void op_##NAME([[maybe_unused]] Wave& w, [[maybe_unused]] const Ins& I)

#define EACH_LANE for (int l = 0; l < LANES; l++)

}  // namespace gfx950
