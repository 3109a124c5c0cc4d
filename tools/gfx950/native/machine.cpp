// The scheduler: which wave runs next, how long, and what to say when nothing can go on.
#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "numeric.h"

namespace gfx950 {

const Ins& Wave::culprit() const { return performing ? *performing : program[pc]; }

void Wave::fail(const char* kind, const std::string& text) const { throw Stop(kind, text, this, -1, 0); }

static void unknown_instruction(Wave& w, const Ins&) { w.fail("unsupported", "instruction"); }

Machine::Machine(const RunSpec& s)
    : spec(s), regions(s.regions, s.regions + s.region_count), caches(*this),
      random_state(s.seed * 2654435761u + 88172645463325252ull), clock(s.clock_start), checks(s.checks) {
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.low < b.low; });
    caches.devices = s.device_count;
    auto& table = Registry::all();
    programs.resize(size_t(s.launch_count));
    for (int k = 0; k < s.launch_count; k++) {
        const LaunchSpec& launch = s.launches[k];
        Program& p = programs[size_t(k)];
        p.code.resize(size_t(launch.record_count));
        for (i64 i = 0; i < launch.record_count; i++) {
            static_cast<Record&>(p.code[size_t(i)]) = launch.records[i];
            int op = launch.records[i].op;
            p.code[size_t(i)].run = op < 0 ? unknown_instruction : table[size_t(op)].run;
            size_t word = size_t(launch.records[i].pc / 4);
            if (p.index_by_word.size() <= word) p.index_by_word.resize(word + 1, -1);
            p.index_by_word[word] = i32(i);
        }
    }
}
Machine::~Machine() {
    for (Region& r : regions) std::free(r.lines);
}

MemOp* Machine::take_op() {
    if (free_ops.empty()) {
        all_ops.push_back(std::make_unique<MemOp>());
        return all_ops.back().get();
    }
    MemOp* op = free_ops.back();
    free_ops.pop_back();
    return op;
}

u64 Machine::code_address(const Wave& w, int index) const {
    const Program& p = programs[size_t(w.group->launch)];
    return spec.launches[w.group->launch].code_base + u64(p.code[size_t(index)].pc);
}
int Machine::index_of(const Wave& w, u64 address) const {
    u64 word = (address - spec.launches[w.group->launch].code_base) / 4;
    const Program& p = programs[size_t(w.group->launch)];
    if (word >= p.index_by_word.size() || p.index_by_word[word] < 0) w.fail("out of bounds", "a jump to an address outside the kernel");
    return p.index_by_word[word];
}

void Machine::report(const Wave& w, const Ins& I, int kind, int lane, u64 address) {
    auto [it, fresh] = reports.try_emplace({kind, I.pc + (w.group->launch << 24)},
                                           Report{kind, I.pc, w.group->launch, i32(w.group->id), w.id, lane, address, 0});
    it->second.count++;
}

void Machine::clock_idle(Wave& w, u64 cycles) { clock += cycles / 21 / std::max<u64>(1, w.group->waves.size()); }

// A load that repeats an earlier one (same place, same value) brings no news; the wave is waiting for something.
void note_load(Wave& w, const Ins& I, u64 address, u32 value) {
    u64 key = u64(u32(I.pc)) << 32 ^ address * 0x9e3779b97f4a7c15ull ^ value;
    w.last_address = address;
    w.last_value = value;
    w.last_load_pc = I.pc;
    w.repeats = w.seen.add(key) ? 0 : w.repeats + 1;
}

// ---- starting a workgroup ----------------------------------------------------------------------------------------------------

static void fill_constants(const LaunchSpec& launch, u32* s) {
    for (int i = 0; i <= 64; i++) s[128 + i] = u32(i);
    for (int i = 1; i <= 16; i++) s[192 + i] = u32(-i);
    const float values[8] = {.5f, -.5f, 1.f, -1.f, 2.f, -2.f, 4.f, -4.f};
    for (int i = 0; i < 8; i++) s[240 + i] = bits(values[i]);
    s[248] = 0x3e22f983u;  // 1 / (2 pi)
    s[SRC_SHARED_BASE] = 0;
    s[SRC_SHARED_BASE + 1] = 1u << 16;
    for (int i = 0; i < launch.literal_count; i++) s[FIRST_LITERAL + i] = launch.literals[i];
}

std::unique_ptr<Group> Machine::start(int index, u64 id, std::unique_ptr<Group> g) {
    const LaunchSpec& launch = spec.launches[index];
    u32 threads = launch.block[0] * launch.block[1] * launch.block[2], waves = (threads + 63) / 64;
    size_t rows = size_t(launch.vector_rows) * LANES, scalars = size_t(FIRST_LITERAL + launch.literal_count + 4);
    if (!g) {
        g = std::make_unique<Group>();
        g->vectors.resize(rows * waves + 16);
        g->scalars.resize(scalars * waves);
        g->waves.resize(waves);
        g->pendings.resize(waves);
        g->lds.resize(launch.lds_bytes / 4 + 4);
    }
    std::fill(g->vectors.begin(), g->vectors.end(), spec.vector_fill);
    std::fill(g->scalars.begin(), g->scalars.end(), 0xbad5bad5u);
    std::fill(g->lds.begin(), g->lds.end(), spec.lds_fill);
    if (checks & CHECK_UNINITIALISED) g->lds_known.assign(launch.lds_bytes, 0);
    g->lds_bytes = launch.lds_bytes;
    g->alive = int(waves);
    g->at_barrier = 0;
    g->id = i64(id);
    g->x = u32(id % launch.grid[0]);
    g->y = u32(id / launch.grid[0] % launch.grid[1]);
    g->z = u32(id / launch.grid[0] / launch.grid[1]);
    g->xcd = int(id % XCDS);
    g->device = launch.device;
    g->launch = index;
    for (u32 k = 0; k < waves; k++) {
        u64 address = (reinterpret_cast<u64>(g->vectors.data()) + 63) & ~u64(63);
        Wave& w = g->waves[k] = Wave();
        w.v = reinterpret_cast<u32*>(address) + rows * k;
        w.s = g->scalars.data() + scalars * k;
        w.group = g.get();
        w.machine = this;
        w.program = programs[size_t(index)].code.data();
        w.id = i32(k);
        w.pending = &g->pendings[k];
        w.pending->clear();
        w.busy.clear();
        w.known.clear();
        fill_constants(launch, w.s);
        u32 lanes = std::min<u32>(64, threads - 64 * k);
        u64 e = lanes == 64 ? ALL : (u64(1) << lanes) - 1;
        w.set_s64(EXEC, e);
        w.mask_of = ~e;
        w.refresh_mask();
        w.set_s64(VCC, 0);
        w.s[M0] = 0;
        w.mode = (launch.rsrc1 >> 12 & 0xff) | (launch.rsrc1 >> 21 & 1) << 8 | (launch.rsrc1 >> 23 & 1) << 9 | (launch.rsrc1 >> 26 & 1) << 23;
        w.apply_mode();
        if (launch.kernarg_at >= 0) w.set_s64(launch.kernarg_at, launch.kernarg);
        int s = int(launch.user_sgprs);
        if (launch.rsrc2 >> 7 & 1) w.s[s++] = g->x;
        if (launch.rsrc2 >> 8 & 1) w.s[s++] = g->y;
        if (launch.rsrc2 >> 9 & 1) w.s[s++] = g->z;
        u32 known0 = 1;
        for (int l = 0; l < LANES; l++) {
            u32 t = 64 * k + u32(l);
            w.v[l] = (t % launch.block[0]) | (t / launch.block[0] % launch.block[1]) << 10 | (t / launch.block[0] / launch.block[1]) << 20;
        }
        w.known.word[0] = known0;
        for (u32 r = u32(launch.vector_rows); r < 512; r++) w.known.word[r >> 6] |= u64(1) << (r & 63);
    }
    return g;
}

// ---- running -------------------------------------------------------------------------------------------------------------------

void Machine::step(Wave& w, u64 quantum) {
    const LaunchSpec& launch = spec.launches[w.group->launch];
    u64* hits = launch.hits;
    bool checked = checks & (CHECK_HAZARDS | CHECK_UNINITIALISED);
    bool traced = spec.trace && w.group->launch == spec.trace_launch && u32(w.group->id) == spec.trace_group && u32(w.id) == spec.trace_wave;
    now = 0;
    w.yield = false;
    while (now < quantum) {
        const Ins& I = w.program[w.pc];
        w.next = w.pc + 1;
        hits[w.pc]++;
        now++;
        w.executed++;
        if (checked) check_registers(w, I);
        I.run(w, I);
        if (traced) spec.trace(I.pc, w.s, w.v, w.exec(), w.scc);
        w.pc = w.next;
        if (w.state != State::Running || w.yield) break;
    }
    executed += now;
    now = 0;
}

static void fill_stop(RunResult& out, const Stop& stop) {
    out.status = 1;
    std::snprintf(out.kind, sizeof out.kind, "%s", stop.kind.c_str());
    std::snprintf(out.text, sizeof out.text, "%s", stop.what());
    const Wave& w = *stop.wave;
    out.launch = w.group->launch;
    out.group[0] = i32(w.group->x);
    out.group[1] = i32(w.group->y);
    out.group[2] = i32(w.group->z);
    out.wave = w.id;
    out.lane = stop.lane;
    out.pc = w.culprit().pc;
    out.address = stop.address;
}

void Machine::describe_waits(std::vector<std::unique_ptr<Group>>& resident, RunResult& out) {
    for (auto& g : resident)
        for (Wave& w : g->waves) {
            if (w.state == State::Done || out.wait_count == 32) continue;
            auto& x = out.waits[out.wait_count++];
            x.launch = g->launch;
            x.group = i32(g->id);
            x.wave = w.id;
            x.pc = w.program[w.pc].pc;
            x.load_pc = w.last_load_pc;
            x.state = i32(w.state);
            x.address = w.last_address;
            x.value = w.last_value;
            std::string note = w.state == State::Running ? caches.explain(w.last_address, 4) : "";
            std::snprintf(x.note, sizeof x.note, "%s", note.c_str());
        }
}

// Waiting is told from behaviour: every wave that could run has only repeated loads that bring nothing new, and nobody has
// changed memory for a long time. A wave that watches the clock gets time instead.
void Machine::detect_deadlock(std::vector<std::unique_ptr<Group>>& resident, RunResult& out) {
    if (executed - last_effect < spec.deadlock_after) return;
    bool clocked = false;
    for (auto& g : resident)
        for (Wave& w : g->waves) {
            if (w.state != State::Running) continue;
            if (w.repeats < 64) return;
            clocked |= w.read_clock;
        }
    if (clocked && clock_jumps < 64) {
        clock_jumps++;
        clock += 100'000'000;  // one second
        last_effect = executed;
        for (auto& g : resident)
            for (Wave& w : g->waves) w.read_clock = false;
        return;
    }
    describe_waits(resident, out);
    throw Stop("deadlock", "in " + std::to_string(spec.deadlock_after) + " instructions (deadlock_after) nobody changed memory, and all waves keep reading the same values", &resident[0]->waves[0], -1, 0);
}

static bool unsettled(const Group& g) {
    return std::any_of(g.waves.begin(), g.waves.end(), [](const Wave& w) { return w.unsettled != 0; });
}

void Machine::run(RunResult& out) {
    std::vector<std::unique_ptr<Group>> resident;
    std::vector<std::vector<std::unique_ptr<Group>>> pool(size_t(spec.launch_count));
    std::vector<u64> next(size_t(spec.launch_count)), total(size_t(spec.launch_count)), left(size_t(spec.launch_count)), here(size_t(spec.launch_count));
    u64 remaining = 0;
    for (int k = 0; k < spec.launch_count; k++) {
        const LaunchSpec& l = spec.launches[k];
        total[size_t(k)] = left[size_t(k)] = u64(l.grid[0]) * l.grid[1] * l.grid[2];
        remaining += total[size_t(k)];
    }
    try {
        while (remaining) {
            for (size_t k = 0; k < total.size(); k++)
                while (next[k] < total[k] && here[k] < u64(spec.launches[k].resident)) {
                    std::unique_ptr<Group> old;
                    if (!pool[k].empty()) {
                        old = std::move(pool[k].back());
                        pool[k].pop_back();
                    }
                    resident.push_back(start(int(k), next[k]++, std::move(old)));
                    here[k]++;
                    out.waves += resident.back()->waves.size();
                }
            bool ran = false;
            if (spec.seed)
                for (size_t k = resident.size(); k > 1; k--) std::swap(resident[k - 1], resident[random() % k]);
            for (size_t gi = 0; gi < resident.size(); gi++) {
                Group& g = *resident[gi];
                size_t n = g.waves.size(), first = spec.seed ? random() % n : 0;
                for (size_t k = 0; k < n; k++) {
                    Wave& w = g.waves[(first + k) % n];
                    if (weak()) settle_some(w);
                    if (w.state != State::Running) continue;
                    step(w, spec.seed ? 1 + random() % spec.quantum : spec.quantum);
                    ran = true;
                    if (w.state == State::Done) {
                        g.alive--;
                        effect();
                        out.longest_wave = std::max(out.longest_wave, w.executed);
                    } else if (w.state == State::Barrier) {
                        g.at_barrier++;
                    }
                    if (g.alive && g.at_barrier == g.alive) {
                        for (Wave& x : g.waves)
                            if (x.state == State::Barrier) x.state = State::Running;
                        g.at_barrier = 0;
                        effect();
                    }
                }
                if (g.alive) continue;
                if (weak() && unsettled(g)) {
                    ran = true;
                    continue;
                }
                size_t k = size_t(g.launch);
                here[k]--;
                remaining--;
                if (--left[k] == 0 && weak()) caches.flush_device(spec.launches[k].device);
                pool[k].push_back(std::move(resident[gi]));
                resident[gi] = std::move(resident.back());
                resident.pop_back();
                gi--;
            }
            out.rounds++;
            clock += spec.ticks_per_round;
            if (!ran && remaining) {
                describe_waits(resident, out);
                throw Stop("deadlock", "every wave waits at a barrier that the rest of its workgroup will not reach", &resident[0]->waves[0], -1, 0);
            }
            if (!resident.empty()) detect_deadlock(resident, out);
            if (executed > spec.budget && remaining) {
                describe_waits(resident, out);
                throw Stop("budget", "the instruction budget of " + std::to_string(spec.budget) + " is used up", &resident[0]->waves[0], -1, 0);
            }
        }
    } catch (const Stop& stop) {
        fill_stop(out, stop);
    }
    out.executed = executed;
    out.clock = clock;
    for (auto& [key, r] : reports)
        if (out.report_count < 64) out.reports[out.report_count++] = r;
}

}  // namespace gfx950

// ---- what Python calls -----------------------------------------------------------------------------------------------------------

extern "C" {
int gfx950_operation_count() { return int(gfx950::Registry::all().size()); }
const char* gfx950_operation_name(int k) { return gfx950::Registry::all()[size_t(k)].name; }
int gfx950_sizes(int which) {
    using namespace gfx950;
    const int sizes[] = {int(sizeof(Record)), int(sizeof(Region)), int(sizeof(LaunchSpec)), int(sizeof(RunSpec)), int(sizeof(RunResult))};
    return sizes[which];
}
int gfx950_run(const gfx950::RunSpec* spec, gfx950::RunResult* out) {
    gfx950::Machine machine(*spec);
    machine.run(*out);
    return out->status;
}
}
