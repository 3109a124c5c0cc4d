// The machine: workgroups, waves, the scheduler's state, reports.
#pragma once
#include <map>
#include <memory>
#include <stdexcept>

#include "memory.h"

namespace gfx950 {

struct Group {
    std::vector<u32> lds, vectors, scalars;
    std::vector<u8> lds_known;   // one byte a byte, when uninitialised reads are followed
    std::vector<Wave> waves;
    std::vector<Pending> pendings;
    u32 lds_bytes = 0;
    int alive = 0, at_barrier = 0;
    u32 x = 0, y = 0, z = 0;
    i64 id = 0;
    int xcd = 0, device = 0, launch = 0;
};

// Thrown where execution cannot go on; caught by the scheduler and handed to Python.
struct Stop : std::runtime_error {
    std::string kind;
    const Wave* wave;
    int lane;
    u64 address;
    Stop(const char* k, const std::string& text, const Wave* w, int l, u64 a)
        : std::runtime_error(text), kind(k), wave(w), lane(l), address(a) {}
};

struct Report {
    i32 kind, pc, launch, group, wave, lane;
    u64 address, count;
};
enum ReportKind { REPORT_MISALIGNED, REPORT_UNINITIALISED_REGISTER, REPORT_UNINITIALISED_LDS, REPORT_UNINITIALISED_MEMORY };

enum Check : u32 { CHECK_UNINITIALISED = 1, CHECK_HAZARDS = 2, CHECK_PROFILE = 4, CHECK_MISALIGNED = 8 };

// Filled by Python, one for each kernel launch that runs at the same time.
struct LaunchSpec {
    const Record* records;
    i64 record_count;
    const u32* literals;
    i32 literal_count, vector_rows;
    u32 grid[3], block[3];
    u32 lds_bytes, user_sgprs, rsrc1, rsrc2;
    u64 kernarg, code_base;
    i32 device, resident;
    u64* hits;          // executions of each instruction
    u64* traffic;       // [space][scope][load, store] bytes, then LDS bank conflict cycles
    i32 kernarg_at;     // scalar register that receives the address of the arguments, or -1
};
struct RunSpec {
    const LaunchSpec* launches;
    const Region* regions;
    i32 launch_count, region_count, device_count, weak;
    u64 seed, quantum, budget, clock_start, ticks_per_round;
    u32 checks, lds_fill, vector_fill, trace_group, trace_wave;
    i32 trace_launch;
    void (*trace)(i32 pc, const u32* scalars, const u32* vectors, u64 exec, u32 scc);
    u64 deadlock_after;
};
struct RunResult {
    u64 executed, waves, rounds, longest_wave, clock;
    i32 status, report_count, wait_count;
    char kind[32];
    char text[2048];
    i32 launch, group[3], wave, lane, pc;
    u64 address;
    Report reports[64];
    struct Waiting {
        i32 launch, group, wave, pc, load_pc, state;
        u64 address;
        u32 value, pad;
        char note[256];
    } waits[32];
};

struct Program {
    std::vector<Ins> code;
    std::vector<i32> index_by_word;
};

struct Machine {
    const RunSpec& spec;
    std::vector<Region> regions;
    Region* last_region = nullptr;
    std::vector<Program> programs;
    Caches caches;
    u64 random_state, clock, executed = 0, last_effect = 0;
    u64 now = 0;                       // instructions executed so far, within the round
    int clock_jumps = 0;
    u32 checks;
    std::map<std::pair<int, int>, Report> reports;
    std::vector<MemOp*> free_ops;
    std::vector<std::unique_ptr<MemOp>> all_ops;

    explicit Machine(const RunSpec& s);
    ~Machine();
    u64 random() {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return random_state;
    }
    bool weak() const { return spec.weak != 0; }
    void clock_idle(Wave& w, u64 cycles);
    u64 code_address(const Wave& w, int index) const;
    int index_of(const Wave& w, u64 address) const;
    void report(const Wave& w, const Ins& I, int kind, int lane, u64 address);
    MemOp* take_op();
    void give_op(MemOp* op) { free_ops.push_back(op); }
    u64* traffic(const Wave& w) const { return spec.launches[w.group->launch].traffic; }
    void count(const Wave& w, int space, int scope, bool store, u64 bytes) {
        traffic(w)[(space * 4 + scope) * 2 + (store ? 1 : 0)] += bytes;
    }
    void effect() { last_effect = executed + now; }
    void run(RunResult& out);

   private:
    std::unique_ptr<Group> start(int launch, u64 id, std::unique_ptr<Group> old);
    void step(Wave& w, u64 quantum);
    void detect_deadlock(std::vector<std::unique_ptr<Group>>& resident, RunResult& out);
    void describe_waits(std::vector<std::unique_ptr<Group>>& resident, RunResult& out);
};

void note_load(Wave& w, const Ins& I, u64 address, u32 value);  // deadlock report: what a wave keeps reading

}  // namespace gfx950
