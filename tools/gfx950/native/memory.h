// Memory operations from issue to effect, and the caches between a wave and memory.
//
// An operation is described once (MemOp) and performed once. In the flat model it is performed when it is issued. In the
// weak model it is performed at a seeded moment between its issue and the wait that covers it, and a store reaches only
// the cache level that its scope asks for.
#pragma once
#include <algorithm>
#include <deque>
#include <vector>

#include "core.h"

namespace gfx950 {

constexpr int LINE = 128;     // bytes of a cache line
constexpr int XCDS = 8;       // compute dies, each with its own L2
constexpr int MAX_DEVICES = 8;

enum Scope { SCOPE_WAVE, SCOPE_GROUP, SCOPE_DEVICE, SCOPE_SYSTEM };
inline int scope_of(const Ins& I, bool atomic = false) {
    if (atomic) return (I.flags & F_SC1) ? SCOPE_SYSTEM : SCOPE_DEVICE;  // sc0 of an atomic means "return the old value"
    return (I.flags & F_SC1 ? 2 : 0) | (I.flags & F_SC0 ? 1 : 0);
}
enum Space { SPACE_GLOBAL, SPACE_LDS, SPACE_SCALAR, SPACES };

struct Line;

// Presence of an untouched line in the caches, one entry a line. Once a line is written it is "tracked": its copies are
// then kept explicitly (Line).
struct LineState {
    Line* tracked = nullptr;
    u64 in_l2 = 0;      // bit device * XCDS + xcd
    u8 in_device = 0;   // bit device
};

struct Region {
    u64 low, high;
    i32 device;         // owner; -1: host memory, open to every device
    u32 flags;          // RegionFlag
    u8* known;          // one byte for each byte: written at least once; null when not followed
    LineState* lines = nullptr;
};
enum RegionFlag : u32 { REGION_READ_ONLY = 1, REGION_PEER = 2 };

struct Copy {
    u8 data[LINE];
    u64 valid[2] = {0, 0}, dirty[2] = {0, 0};
    i32 writer_pc = -1, writer_wave = -1, writer_group = -1;
};
// The copies of a line, few of them, by who holds them.
struct Copies {
    std::vector<std::pair<int, Copy>> all;
    Copy* find(int holder) {
        for (auto& [who, copy] : all)
            if (who == holder) return &copy;
        return nullptr;
    }
    Copy& operator[](int holder) {  // made where there is none; other references are void then
        if (Copy* copy = find(holder)) return *copy;
        return all.emplace_back(holder, Copy()).second;
    }
};
struct Line {
    u64 number;
    Copies l2;      // by device * XCDS + xcd
    Copies device;  // by device; only with several devices
};

struct Caches {
    Machine& machine;
    int devices = 1;
    std::deque<Line> lines;                              // all that are tracked
    std::vector<LineState*> filled[MAX_DEVICES * XCDS];  // untouched lines that an L2 holds
    std::vector<LineState*> filled_device[MAX_DEVICES];
    std::vector<Line*> held[MAX_DEVICES * XCDS], dirty[MAX_DEVICES * XCDS];  // with a copy / an unwritten byte
    explicit Caches(Machine& m) : machine(m) {}
    void read(Wave& w, Region& r, u64 address, u8* out, u32 n, int scope);
    bool direct(Wave& w, Region& r, u64 line, int scope);  // notes that the caches hold it; true while memory is its only version
    void write(Wave& w, Region& r, u64 address, const u8* in, u32 n, int scope);
    void before_atomic(Wave& w, Region& r, u64 address, u32 n, int scope);
    u8* atomic_place(Wave& w, Region& r, u64 address, u32 n, int scope);
    void write_back(int device, int xcd, int scope);
    void invalidate(int device, int xcd, int scope);
    void flush_device(int device);
    std::string explain(u64 address, u32 n) const;       // who holds an unseen store to these bytes

   private:
    Line& track(Region& r, u64 line);
    void read_line(Wave& w, Region& r, u64 line, u32 offset, u8* out, u32 n, int scope);
    void write_line(Wave& w, Region& r, u64 line, u32 offset, const u8* in, u32 n, int scope);
    void store_below_l2(Line& line, int device, u32 first, u32 n, const u8* in, int scope);
};

struct MemOp {
    void (*perform)(Wave&, MemOp&) = nullptr;
    const Ins* ins = nullptr;
    u64 lanes = 0;
    u64 zero[4] = {0, 0, 0, 0};   // lanes whose dword k lies outside the buffer: loads give 0, stores do nothing
    u64 low = 0, high = 0;        // bounds of the addresses
    u32 size = 0, step = 0, lds_base = 0;  // bytes of an element, elements
    bool store = false, lds = false, done = false;
    u64 address[LANES];
    u32 data[4][LANES];
    u32 slot() const { return std::max<u32>(4, size * std::max<u32>(1, step)); }  // bytes of LDS that a lane loads into
};

// Operations of one wave that no wait has covered yet, oldest first. `op` is null when already performed.
struct Pending {
    struct Entry {
        const Ins* ins;
        MemOp* op;
    };
    std::vector<Entry> vector, lgkm;
    void clear() {
        vector.clear();
        lgkm.clear();
    }
};

void submit(Wave& w, MemOp& op);                       // perform now or queue, by the memory model
void note_issue(Wave& w, const Ins& I, MemOp* op);     // enter the counters without an effect to delay
void wait_counters(Wave& w, u32 vector, u32 lgkm);
void settle_some(Wave& w);                             // weak model: let a random pending operation happen
void settle_vector(Wave& w);                           // all vector-memory operations of the wave happen now
void drain_lds(Wave& w);                               // LDS operations of a wave happen in order
void check_registers(Wave& w, const Ins& I);           // a load outstanding, or never written

Region* find_region(Wave& w, u64 address, u32 n, bool store);
void load_bytes(Wave& w, const Ins& I, u64 address, void* out, u32 n, int scope, int lane);
void store_bytes(Wave& w, const Ins& I, u64 address, const void* in, u32 n, int scope, int lane);

}  // namespace gfx950
