// Counters, waits and the moment at which an operation takes effect.
#include <algorithm>

#include "machine.h"

namespace gfx950 {

static void rebuild_busy(Wave& w) {
    w.outstanding = !w.pending->vector.empty() || !w.pending->lgkm.empty();
    w.busy.clear();
    w.busy_s[0] = w.busy_s[1] = 0;
    for (auto* queue : {&w.pending->vector, &w.pending->lgkm})
        for (auto& e : *queue) {
            w.busy.add(e.ins->vwrite);
            if (e.ins->flags & F_SMEM) {
                w.busy_s[0] |= u64(e.ins->swrite[0]) | u64(e.ins->swrite[1]) << 32;
                w.busy_s[1] |= u64(e.ins->swrite[2]) | u64(e.ins->swrite[3]) << 32;
            }
        }
}

// Lets an operation happen, unless it has.
static void perform(Wave& w, Pending::Entry& e) {
    MemOp* op = e.op;
    if (!op) return;
    e.op = nullptr;
    w.unsettled--;
    const Ins* outer = w.performing;
    w.performing = e.ins;
    op->perform(w, *op);
    w.performing = outer;
    w.machine->give_op(op);
}

static bool meet(const u32* a, const u32* b) {
    u32 hit = 0;
    for (int k = 0; k < 16; k++) hit |= a[k] & b[k];
    return hit;
}
// Whether two vector-memory operations of a wave must happen in the order of their issue: one stores to bytes of the
// other, or both write to a register or to the same bytes of LDS, as results return in order.
static bool ordered(const MemOp& a, const MemOp& b) {
    bool memory = (a.store || b.store) && a.low < b.high && b.low < a.high;
    bool lds = a.lds && b.lds && a.lds_base < b.lds_base + LANES * b.slot() && b.lds_base < a.lds_base + LANES * a.slot();
    return memory || lds || meet(a.ins->vwrite, b.ins->vwrite);
}

// Earlier operations of the wave that must happen before this one do so now.
static void keep_order(Wave& w, const MemOp& op) {
    for (auto& e : w.pending->vector)
        if (e.op && ordered(*e.op, op)) perform(w, e);
}

void note_issue(Wave& w, const Ins& I, MemOp* op) {
    Pending& p = *w.pending;
    if (I.flags & F_VMEM) {
        if (p.vector.size() >= 63) wait_counters(w, 62, 15);  // the counter is full: the wave stalls
        p.vector.push_back({&I, op});
    }
    if (I.flags & (F_DS | F_SMEM | F_FLAT)) {
        if (p.lgkm.size() >= 15) wait_counters(w, 63, 14);
        p.lgkm.push_back({&I, (I.flags & F_VMEM) ? nullptr : op});
    }
    w.outstanding = true;
    w.unsettled += op != nullptr;
    w.busy.add(I.vwrite);
    if (I.flags & F_SMEM) {
        w.busy_s[0] |= u64(I.swrite[0]) | u64(I.swrite[1]) << 32;
        w.busy_s[1] |= u64(I.swrite[2]) | u64(I.swrite[3]) << 32;
    }
}

void submit(Wave& w, MemOp& op) {
    const Ins& I = *op.ins;
    if (!w.machine->weak()) {
        op.perform(w, op);
        note_issue(w, I, nullptr);
        return;
    }
    keep_order(w, op);
    if (!(I.flags & F_DS) && (w.machine->random() & 3) == 0) {
        op.perform(w, op);
        note_issue(w, I, nullptr);
        return;
    }
    MemOp* kept = w.machine->take_op();
    *kept = op;
    note_issue(w, I, kept);
}

// With n operations of a counter allowed to be outstanding, an operation is known to be done when more than n could not
// all be younger: LDS and vector-memory operations complete in order, scalar loads in any order.
void wait_counters(Wave& w, u32 vector, u32 lgkm) {
    Pending& p = *w.pending;
    if (p.vector.size() <= vector && p.lgkm.size() <= lgkm) return;
    if (p.vector.size() > vector) {
        auto end = p.vector.end() - i64(vector);
        for (auto e = p.vector.begin(); e != end; ++e) perform(w, *e);
        p.vector.erase(p.vector.begin(), end);
    }
    if (p.lgkm.size() > lgkm) {
        u32 in_order = 0;
        size_t kept = 0;
        for (auto& e : p.lgkm) in_order += !(e.ins->flags & F_SMEM);
        for (auto& e : p.lgkm) {
            bool scalar = e.ins->flags & F_SMEM;
            if (scalar ? lgkm > 0 : in_order-- <= lgkm) p.lgkm[kept++] = e;
            else perform(w, e);
        }
        p.lgkm.resize(kept);
    }
    rebuild_busy(w);
}

void settle_vector(Wave& w) {
    for (auto& e : w.pending->vector) perform(w, e);
}

void drain_lds(Wave& w) {
    if (!w.machine->weak()) return;
    for (auto& e : w.pending->lgkm) perform(w, e);
}

void settle_some(Wave& w) {
    if (!w.outstanding) return;
    u64 r = w.machine->random();
    if (!w.unsettled) return;
    Pending& p = *w.pending;
    if (!p.vector.empty() && (r & 1)) perform(w, p.vector[(r >> 8) % p.vector.size()]);
    if (!p.lgkm.empty() && (r & 2) && (r & 12)) {
        auto oldest = std::find_if(p.lgkm.begin(), p.lgkm.end(), [](auto& e) { return e.op; });  // LDS keeps its order
        if (oldest != p.lgkm.end()) perform(w, *oldest);
    }
}

static std::string names_of(const u32* set) {
    std::string text;
    for (int r = 0; r < 512; r++)
        if (set[r >> 5] >> (r & 31) & 1) text += (text.empty() ? "" : ", ") + std::string(r < 256 ? "v" : "a") + std::to_string(r & 255);
    return text;
}

static void check_busy(Wave& w, const Ins& I) {
    for (auto* queue : {&w.pending->vector, &w.pending->lgkm})
        for (auto& e : *queue) {
            bool same_order = (I.flags & e.ins->flags & (F_VMEM | F_DS)) != 0;  // results return in order
            u32 hit[16], any = 0;
            for (int k = 0; k < 16; k++) {
                hit[k] = e.ins->vwrite[k] & (I.vread[k] | (same_order ? 0 : I.vwrite[k]));
                any |= hit[k];
            }
            u32 hit_s = 0;
            if (e.ins->flags & F_SMEM)
                for (int k = 0; k < 4; k++) hit_s |= e.ins->swrite[k] & (I.sread[k] | I.swrite[k]);
            if (!any && !hit_s) continue;
            char at[64];
            std::snprintf(at, sizeof at, " before a wait covers the load at 0x%x", e.ins->pc);
            w.fail("missing wait", (any ? names_of(hit) : std::string("a scalar register")) + " is used" + at);
        }
}

void check_registers(Wave& w, const Ins& I) {
    if ((w.machine->checks & CHECK_HAZARDS) && w.outstanding) {
        u64 s0 = u64(I.sread[0] | I.swrite[0]) | u64(I.sread[1] | I.swrite[1]) << 32;
        u64 s1 = u64(I.sread[2] | I.swrite[2]) | u64(I.sread[3] | I.swrite[3]) << 32;
        if (w.busy.meets(I.vread) || w.busy.meets(I.vwrite) || (w.busy_s[0] & s0) || (w.busy_s[1] & s1)) check_busy(w, I);
    }
    if (w.machine->checks & CHECK_UNINITIALISED) {
        if (w.known.lacks(I.vread)) w.machine->report(w, I, REPORT_UNINITIALISED_REGISTER, -1, 0);
        w.known.add(I.vwrite);
    }
}

}  // namespace gfx950
