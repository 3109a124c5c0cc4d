// Counters, waits and the moment at which an operation takes effect.
#include <algorithm>

#include "machine.h"

namespace gfx950 {

static void rebuild_busy(Wave& w) {
    w.outstanding = w.pending->vector.count || w.pending->lgkm.count;
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

static void perform(Wave& w, MemOp* op) {
    w.unsettled--;
    op->perform(w, *op);
    w.machine->give_op(op);
}

// Earlier operations of the same wave on the same bytes keep their order.
void keep_order(Wave& w, const MemOp& op) {
    for (auto& e : w.pending->vector) {
        MemOp* q = e.op;
        if (q && (q->store || op.store) && q->low < op.high && op.low < q->high) {
            e.op = nullptr;
            perform(w, q);
        }
    }
}

void note_issue(Wave& w, const Ins& I, MemOp* op) {
    Pending& p = *w.pending;
    if (I.flags & F_VMEM) {
        if (p.vector.count == 63) wait_counters(w, 62, 15);  // the counter is full: the wave stalls
        p.vector.add(I, op);
    }
    if (I.flags & (F_DS | F_SMEM | F_FLAT)) {
        if (p.lgkm.count == 15) wait_counters(w, 63, 14);
        p.lgkm.add(I, (I.flags & F_VMEM) ? nullptr : op);
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
    if (p.vector.count <= vector && p.lgkm.count <= lgkm) return;
    if (p.vector.count > vector) {
        u32 done = p.vector.count - vector;
        for (u32 i = 0; i < done; i++)
            if (MemOp* op = p.vector.entries[i].op) perform(w, op);
        std::copy(p.vector.begin() + done, p.vector.end(), p.vector.begin());
        p.vector.count = vector;
    }
    if (p.lgkm.count > lgkm) {
        u32 in_order = 0, kept = 0;
        for (auto& e : p.lgkm) in_order += !(e.ins->flags & F_SMEM);
        for (auto& e : p.lgkm) {
            bool scalar = e.ins->flags & F_SMEM;
            if (scalar ? lgkm > 0 : in_order-- <= lgkm) p.lgkm.entries[kept++] = e;
            else if (e.op) perform(w, e.op);
        }
        p.lgkm.count = kept;
    }
    rebuild_busy(w);
}

void settle_vector(Wave& w) {
    for (auto& e : w.pending->vector)
        if (MemOp* op = e.op) {
            e.op = nullptr;
            perform(w, op);
        }
}

void drain_lds(Wave& w) {
    if (!w.machine->weak()) return;
    for (auto& e : w.pending->lgkm)
        if (e.op) {
            MemOp* op = e.op;
            e.op = nullptr;
            perform(w, op);
        }
}

void settle_some(Wave& w) {
    if (!w.outstanding) return;
    u64 r = w.machine->random();
    if (!w.unsettled) return;
    Pending& p = *w.pending;
    if (p.vector.count && (r & 1)) {
        auto& e = p.vector.entries[(r >> 8) % p.vector.count];
        if (MemOp* op = e.op) {
            for (auto& earlier : p.vector) {  // the same bytes stay in order
                if (&earlier == &e) break;
                MemOp* q = earlier.op;
                if (q && (q->store || op->store) && q->low < op->high && op->low < q->high) return;
            }
            e.op = nullptr;
            perform(w, op);
        }
    }
    if (p.lgkm.count && (r & 2) && (r & 12)) {
        for (auto& e : p.lgkm)
            if (e.op) {  // the oldest: LDS keeps its order
                MemOp* op = e.op;
                e.op = nullptr;
                perform(w, op);
                break;
            }
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
