// The weak memory model: what a load may see and where a store goes.
//
// Levels: the L2 of each XCD, a device level (only with several devices), memory. A plain store stays in its XCD's L2; a
// device-scope store (sc1) goes through to the device level, a system-scope store (sc0 sc1) to memory. A load takes the
// first level that it may use: plain loads any copy in their L2, however old; device-scope loads pass the L2; system-scope
// loads pass both. A wave always sees the bytes that its own XCD has not written back. Nothing is written back or dropped
// before buffer_wbl2, buffer_inv or the end of the kernel demands it.
#include <algorithm>
#include <cstdlib>

#include "machine.h"

namespace gfx950 {

static bool bit(const u64* m, u32 k) { return m[k >> 6] >> (k & 63) & 1; }
static void set(u64* m, u32 k) { m[k >> 6] |= u64(1) << (k & 63); }
static void drop(u64* m, u32 k) { m[k >> 6] &= ~(u64(1) << (k & 63)); }
static void range(u32 first, u32 n, u64* m) {  // bits [first, first + n) of a line's 128
    for (int half = 0; half < 2; half++) {
        u32 low = std::max<i64>(i64(first) - 64 * half, 0), high = u32(std::clamp<i64>(i64(first) + n - 64 * half, 0, 64));
        m[half] = high > low ? (high - low == 64 ? ~u64(0) : ((u64(1) << (high - low)) - 1) << low) : 0;
    }
}
static void add(u64* m, const u64* span) {
    m[0] |= span[0];
    m[1] |= span[1];
}
static void remove(u64* m, const u64* span) {
    m[0] &= ~span[0];
    m[1] &= ~span[1];
}
static u8* memory(u64 address) { return reinterpret_cast<u8*>(address); }

static LineState& state_of(Region& r, u64 line) {
    u64 first = r.low / LINE;
    if (!r.lines) r.lines = static_cast<LineState*>(std::calloc(r.high / LINE - first + 2, sizeof(LineState)));
    return r.lines[line - first];
}
static u32 visible(const Region& r, u64 base) { return u32(r.high > base + LINE ? LINE : r.high - base); }

// From here on the line's copies are explicit: every cache that held it untouched gets a clean copy of the old bytes.
Line& Caches::track(Region& r, u64 number) {
    LineState& state = state_of(r, number);
    if (state.tracked) return *state.tracked;
    Line& line = lines.emplace_back();
    line.number = number;
    state.tracked = &line;
    u64 base = number * LINE;
    u32 first = base < r.low ? u32(r.low - base) : 0, end = visible(r, base);
    auto copy_clean = [&](Copy& c) {
        std::memcpy(c.data + first, memory(base + first), end - first);
        for (u32 k = first; k < end; k++) set(c.valid, k);
    };
    for (u64 m = state.in_l2; m; m &= m - 1) {
        copy_clean(line.l2[__builtin_ctzll(m)]);
        held[__builtin_ctzll(m)].push_back(&line);
    }
    for (u32 m = state.in_device; m && devices > 1; m &= m - 1) copy_clean(line.device[__builtin_ctz(m)]);
    return line;
}

bool Caches::direct(Wave& w, Region& r, u64 number, int scope) {
    LineState& state = state_of(r, number);
    if (state.tracked) return false;
    int device = w.group->device, l2 = device * XCDS + w.group->xcd;
    if (scope < SCOPE_DEVICE && !(state.in_l2 >> l2 & 1)) {
        state.in_l2 |= u64(1) << l2;
        filled[l2].push_back(&state);
    }
    if (devices > 1 && scope < SCOPE_SYSTEM && !(state.in_device >> device & 1)) {
        state.in_device |= u8(1 << device);
        filled_device[device].push_back(&state);
    }
    return true;
}

void Caches::read_line(Wave& w, Region& r, u64 number, u32 offset, u8* out, u32 n, int scope) {
    int device = w.group->device, l2 = device * XCDS + w.group->xcd;
    u64 base = number * LINE;
    if (direct(w, r, number, scope)) {
        std::memcpy(out, memory(base + offset), n);
        return;
    }
    Line& line = *state_of(r, number).tracked;
    Copy* near = scope < SCOPE_DEVICE ? &line.l2[l2] : line.l2.find(l2);
    if (near && scope < SCOPE_DEVICE && !(near->valid[0] | near->valid[1])) held[l2].push_back(&line);
    Copy* far = nullptr;
    if (devices > 1) far = scope < SCOPE_SYSTEM ? &line.device[device] : line.device.find(device);
    if (near && scope < SCOPE_DEVICE) {  // everything in the near copy
        u64 span[2];
        range(offset, n, span);
        if ((near->valid[0] & span[0]) == span[0] && (near->valid[1] & span[1]) == span[1]) {
            std::memcpy(out, near->data + offset, n);
            return;
        }
    }
    if (!near && !far) {
        std::memcpy(out, memory(base + offset), n);
        return;
    }
    for (u32 i = 0; i < n; i++) {
        u32 k = offset + i;
        if (near && (bit(near->dirty, k) || (scope < SCOPE_DEVICE && bit(near->valid, k)))) {
            out[i] = near->data[k];
            continue;
        }
        u8 x;
        if (far && (bit(far->dirty, k) || (scope < SCOPE_SYSTEM && bit(far->valid, k)))) {
            x = far->data[k];
        } else {
            x = *memory(base + k);
            if (far && scope < SCOPE_SYSTEM) {
                far->data[k] = x;
                set(far->valid, k);
            } else if (far) {
                drop(far->valid, k);
            }
        }
        if (near && scope < SCOPE_DEVICE) {
            near->data[k] = x;
            set(near->valid, k);
        } else if (near) {
            drop(near->valid, k);
        }
        out[i] = x;
    }
}

void Caches::store_below_l2(Line& line, int device, u32 first, u32 n, const u8* in, int scope) {
    u64 span[2];
    range(first, n, span);
    if (devices > 1 && scope < SCOPE_SYSTEM) {
        Copy& far = line.device[device];
        std::memcpy(far.data + first, in, n);
        add(far.valid, span);
        add(far.dirty, span);
        return;
    }
    if (Copy* far = devices > 1 ? line.device.find(device) : nullptr) {
        remove(far->valid, span);
        remove(far->dirty, span);
    }
    std::memcpy(memory(line.number * LINE + first), in, n);
}

void Caches::write_line(Wave& w, Region& r, u64 number, u32 offset, const u8* in, u32 n, int scope) {
    int device = w.group->device, l2 = device * XCDS + w.group->xcd;
    Line& line = track(r, number);
    u64 span[2];
    range(offset, n, span);
    if (scope < SCOPE_DEVICE) {
        Copy& near = line.l2[l2];
        if (!(near.valid[0] | near.valid[1])) held[l2].push_back(&line);
        if (!(near.dirty[0] | near.dirty[1])) dirty[l2].push_back(&line);
        std::memcpy(near.data + offset, in, n);
        add(near.valid, span);
        add(near.dirty, span);
        near.writer_pc = w.culprit().pc;
        near.writer_wave = w.id;
        near.writer_group = i32(w.group->id);
        return;
    }
    if (Copy* near = line.l2.find(l2)) {
        remove(near->valid, span);
        remove(near->dirty, span);
    }
    store_below_l2(line, device, offset, n, in, scope);
}

void Caches::read(Wave& w, Region& r, u64 address, u8* out, u32 n, int scope) {
    while (n) {
        u32 offset = u32(address % LINE), part = std::min<u32>(n, LINE - offset);
        read_line(w, r, address / LINE, offset, out, part, scope);
        address += part;
        out += part;
        n -= part;
    }
}
void Caches::write(Wave& w, Region& r, u64 address, const u8* in, u32 n, int scope) {
    while (n) {
        u32 offset = u32(address % LINE), part = std::min<u32>(n, LINE - offset);
        write_line(w, r, address / LINE, offset, in, part, scope);
        address += part;
        in += part;
        n -= part;
    }
}

// Atomics happen below the L2s (device scope) or in memory (system scope). The XCD's own unwritten bytes go down first.
u8* Caches::atomic_place(Wave& w, Region& r, u64 address, u32 n, int scope) {
    int device = w.group->device, l2 = device * XCDS + w.group->xcd;
    Line& line = track(r, address / LINE);
    u64 base = address / LINE * LINE;
    u32 offset = u32(address % LINE);
    if (Copy* near = line.l2.find(l2))
        for (u32 k = offset; k < offset + n; k++) {
            if (bit(near->dirty, k)) store_below_l2(line, device, k, 1, near->data + k, scope);
            drop(near->valid, k);
            drop(near->dirty, k);
        }
    if (devices == 1) return memory(address);
    Copy& far = line.device[device];
    if (scope == SCOPE_SYSTEM) {
        for (u32 k = offset; k < offset + n; k++) {
            if (bit(far.dirty, k)) *memory(base + k) = far.data[k];
            drop(far.valid, k);
            drop(far.dirty, k);
        }
        return memory(address);
    }
    for (u32 k = offset; k < offset + n; k++) {
        if (!bit(far.valid, k)) far.data[k] = *memory(base + k);
        set(far.valid, k);
        set(far.dirty, k);
    }
    return far.data + offset;
}

void Caches::write_back(int device, int xcd, int scope) {
    if (scope < SCOPE_DEVICE) return;
    int l2 = device * XCDS + xcd;
    for (Line* line : dirty[l2]) {
        Copy& near = line->l2[l2];
        for (u32 k = 0, n; k < LINE; k += n + 1) {
            for (n = 0; k + n < LINE && bit(near.dirty, k + n);) n++;
            if (n) store_below_l2(*line, device, k, n, near.data + k, scope);
        }
        near.dirty[0] = near.dirty[1] = 0;
    }
    dirty[l2].clear();
    if (devices == 1 || scope < SCOPE_SYSTEM) return;
    for (Line& line : lines) {
        Copy* far = line.device.find(device);
        if (!far) continue;
        for (u32 k = 0; k < LINE; k++)
            if (bit(far->dirty, k)) *memory(line.number * LINE + k) = far->data[k];
        far->dirty[0] = far->dirty[1] = 0;
    }
}

void Caches::invalidate(int device, int xcd, int scope) {
    if (scope < SCOPE_DEVICE) return;
    int l2 = device * XCDS + xcd;
    auto clean = [](Copy& c) {
        c.valid[0] = c.dirty[0];
        c.valid[1] = c.dirty[1];
    };
    std::vector<Line*> kept;
    for (Line* line : held[l2]) {
        Copy& near = line->l2[l2];
        clean(near);
        if (near.valid[0] | near.valid[1]) kept.push_back(line);
    }
    held[l2].swap(kept);
    if (devices > 1 && scope == SCOPE_SYSTEM)
        for (Line& line : lines)
            if (Copy* far = line.device.find(device)) clean(*far);
    for (LineState* s : filled[l2]) s->in_l2 &= ~(u64(1) << l2);
    filled[l2].clear();
    if (devices == 1 || scope < SCOPE_SYSTEM) return;
    for (LineState* s : filled_device[device]) s->in_device &= u8(~(1 << device));
    filled_device[device].clear();
}

void Caches::flush_device(int device) {
    for (int xcd = 0; xcd < XCDS; xcd++) write_back(device, xcd, SCOPE_SYSTEM);
}

std::string Caches::explain(u64 address, u32 n) const {
    u64 number = address / LINE;
    auto r = std::find_if(machine.regions.begin(), machine.regions.end(),
                          [=](const Region& x) { return x.low <= address && address < x.high; });
    Line* line = r != machine.regions.end() ? state_of(*r, number).tracked : nullptr;
    if (!line) return "";
    u32 offset = u32(address % LINE);
    for (auto& [l2, copy] : line->l2.all)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.dirty, k)) {
                char text[200];
                std::snprintf(text, sizeof text, "a store to it by workgroup %d wave %d at 0x%x is still in the L2 of device %d XCD %d: it lacks sc1 or a write-back",
                              copy.writer_group, copy.writer_wave, copy.writer_pc, l2 / XCDS, l2 % XCDS);
                return text;
            }
    for (auto& [device, copy] : line->device.all)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.dirty, k)) return "a store to it stops at device scope on device " + std::to_string(device) + ": its reader needs system scope (sc0 sc1)";
    for (auto& [l2, copy] : line->l2.all)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.valid, k) && copy.data[k] != *memory(number * LINE + k))
                return "the L2 of device " + std::to_string(l2 / XCDS) + " XCD " + std::to_string(l2 % XCDS) +
                       " holds an old copy: a reader there needs sc1 or buffer_inv sc1";
    return "";
}

}  // namespace gfx950
