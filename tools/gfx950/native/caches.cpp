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
static u8* memory(u64 address) { return reinterpret_cast<u8*>(address); }

static LineState& state_of(Region& r, u64 line) {
    u64 first = r.low / LINE;
    if (!r.lines) r.lines = static_cast<LineState*>(std::calloc(r.high / LINE - first + 2, sizeof(LineState)));
    return r.lines[line - first];
}
static u32 visible(const Region& r, u64 base) { return u32(r.high > base + LINE ? LINE : r.high - base); }

Line& Caches::at(u64 number) {
    if (!hot || hot_number != number) {
        hot = &lines[number];
        hot_number = number;
    }
    return *hot;
}

// From here on the line's copies are explicit: every cache that held it untouched gets a clean copy of the old bytes.
Line& Caches::track(Region& r, u64 number) {
    LineState& state = state_of(r, number);
    Line& line = at(number);
    if (state.tracked) return line;
    state.tracked = 1;
    u64 base = number * LINE;
    u32 first = base < r.low ? u32(r.low - base) : 0, end = visible(r, base);
    auto copy_clean = [&](Copy& c) {
        std::memcpy(c.data + first, memory(base + first), end - first);
        for (u32 k = first; k < end; k++) set(c.valid, k);
    };
    for (u64 m = state.in_l2; m; m &= m - 1) {
        copy_clean(line.l2[__builtin_ctzll(m)]);
        held[__builtin_ctzll(m)].push_back(number);
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
        filled[l2].push_back(number);
    }
    if (devices > 1 && scope < SCOPE_SYSTEM && !(state.in_device >> device & 1)) {
        state.in_device |= u8(1 << device);
        filled_device[device].push_back(number);
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
    Line& line = at(number);
    Copy* near = nullptr;
    auto found = line.l2.find(l2);
    if (found != line.l2.end()) near = &found->second;
    else if (scope < SCOPE_DEVICE) near = &line.l2[l2];
    if (near && scope < SCOPE_DEVICE && !(near->valid[0] | near->valid[1])) held[l2].push_back(number);
    Copy* far = nullptr;
    if (devices > 1) {
        auto f = line.device.find(device);
        if (f != line.device.end()) far = &f->second;
        else if (scope < SCOPE_SYSTEM) far = &line.device[device];
    }
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

void Caches::store_below_l2(Line& line, u64 base, int device, u32 k, u8 byte, int scope) {
    if (devices > 1 && scope < SCOPE_SYSTEM) {
        Copy& far = line.device[device];
        far.data[k] = byte;
        set(far.valid, k);
        set(far.dirty, k);
        return;
    }
    if (devices > 1) {
        auto f = line.device.find(device);
        if (f != line.device.end()) {
            drop(f->second.valid, k);
            drop(f->second.dirty, k);
        }
    }
    *memory(base + k) = byte;
}

void Caches::write_line(Wave& w, Region& r, u64 number, u32 offset, const u8* in, u32 n, int scope) {
    int device = w.group->device, l2 = device * XCDS + w.group->xcd;
    Line& line = track(r, number);
    u64 base = number * LINE;
    if (scope < SCOPE_DEVICE) {
        Copy& near = line.l2[l2];
        if (!(near.valid[0] | near.valid[1])) held[l2].push_back(number);
        if (!(near.dirty[0] | near.dirty[1])) dirty[l2].push_back(number);
        u64 span[2];
        range(offset, n, span);
        std::memcpy(near.data + offset, in, n);
        for (int half = 0; half < 2; half++) {
            near.valid[half] |= span[half];
            near.dirty[half] |= span[half];
        }
        near.writer_pc = w.program[w.pc].pc;
        near.writer_wave = w.id;
        near.writer_group = i32(w.group->id);
        return;
    }
    auto found = line.l2.find(l2);
    if (found != line.l2.end()) {
        u64 span[2];
        range(offset, n, span);
        for (int half = 0; half < 2; half++) {
            found->second.valid[half] &= ~span[half];
            found->second.dirty[half] &= ~span[half];
        }
    }
    if (devices == 1) {
        std::memcpy(memory(base + offset), in, n);
        return;
    }
    for (u32 i = 0; i < n; i++) store_below_l2(line, base, device, offset + i, in[i], scope);
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
    auto near = line.l2.find(l2);
    if (near != line.l2.end())
        for (u32 k = offset; k < offset + n; k++) {
            if (bit(near->second.dirty, k)) store_below_l2(line, base, device, k, near->second.data[k], scope);
            drop(near->second.valid, k);
            drop(near->second.dirty, k);
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
    for (u64 number : dirty[l2]) {
        Line& line = lines[number];
        Copy& near = line.l2[l2];
        for (u32 k = 0; k < LINE; k++)
            if (bit(near.dirty, k)) store_below_l2(line, number * LINE, device, k, near.data[k], scope);
        near.dirty[0] = near.dirty[1] = 0;
    }
    dirty[l2].clear();
    if (devices == 1 || scope < SCOPE_SYSTEM) return;
    for (auto& [number, line] : lines) {
        auto far = line.device.find(device);
        if (far == line.device.end()) continue;
        for (u32 k = 0; k < LINE; k++)
            if (bit(far->second.dirty, k)) *memory(number * LINE + k) = far->second.data[k];
        far->second.dirty[0] = far->second.dirty[1] = 0;
    }
}

void Caches::invalidate(int device, int xcd, int scope) {
    if (scope < SCOPE_DEVICE) return;
    int l2 = device * XCDS + xcd;
    auto clean = [](Copy& c) {
        c.valid[0] = c.dirty[0];
        c.valid[1] = c.dirty[1];
    };
    std::vector<u64> kept;
    for (u64 number : held[l2]) {
        Copy& near = lines[number].l2[l2];
        clean(near);
        if (near.valid[0] | near.valid[1]) kept.push_back(number);
    }
    held[l2].swap(kept);
    if (devices > 1 && scope == SCOPE_SYSTEM)
        for (auto& [number, line] : lines) {
            auto far = line.device.find(device);
            if (far != line.device.end()) clean(far->second);
        }
    auto forget = [&](std::vector<u64>& list, auto clear) {
        Region* r = nullptr;
        for (u64 number : list) {
            u64 base = number * LINE;
            if (!r || base + LINE <= r->low || base >= r->high) {
                r = nullptr;
                for (Region& candidate : machine.regions)
                    if (base < candidate.high && base + LINE > candidate.low && candidate.lines) r = &candidate;
            }
            if (r) clear(state_of(*r, number));
        }
        list.clear();
    };
    forget(filled[l2], [&](LineState& s) { s.in_l2 &= ~(u64(1) << l2); });
    if (devices > 1 && scope == SCOPE_SYSTEM)
        forget(filled_device[device], [&](LineState& s) { s.in_device &= u8(~(1 << device)); });
}

void Caches::flush_device(int device) {
    for (int xcd = 0; xcd < XCDS; xcd++) write_back(device, xcd, SCOPE_SYSTEM);
}

std::string Caches::explain(u64 address, u32 n) const {
    auto found = lines.find(address / LINE);
    if (found == lines.end()) return "";
    u32 offset = u32(address % LINE);
    for (auto& [l2, copy] : found->second.l2)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.dirty, k)) {
                char text[200];
                std::snprintf(text, sizeof text, "a store to it by workgroup %d wave %d at 0x%x is still in the L2 of device %d XCD %d: it lacks sc1 or a write-back",
                              copy.writer_group, copy.writer_wave, copy.writer_pc, l2 / XCDS, l2 % XCDS);
                return text;
            }
    for (auto& [device, copy] : found->second.device)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.dirty, k)) return "a store to it stops at device scope on device " + std::to_string(device) + ": its reader needs system scope (sc0 sc1)";
    for (auto& [l2, copy] : found->second.l2)
        for (u32 k = offset; k < offset + n && k < u32(LINE); k++)
            if (bit(copy.valid, k) && copy.data[k] != *memory(found->first * LINE + k))
                return "the L2 of device " + std::to_string(l2 / XCDS) + " XCD " + std::to_string(l2 % XCDS) +
                       " holds an old copy: a reader there needs sc1 or buffer_inv sc1";
    return "";
}

}  // namespace gfx950
