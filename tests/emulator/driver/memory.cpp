// Device memory: one mapping per allocation, poisoned, its end against a page without access.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "driver.hpp"

namespace emu {

namespace {
constexpr size_t alignment = 512;
constexpr uint32_t poison_word = 0x7FF7A55A;  // NaN as float and as the halves of a double, absurd as an index
constexpr uint8_t canary = 0xC7;
// Poison takes real memory; what is larger than this stays empty (zeros), and only its touched pages take any.
constexpr size_t poisoned_limit = size_t{1} << 30;
constexpr size_t freed_limit = 4096;

std::map<uintptr_t, std::unique_ptr<Allocation>> live;
std::deque<Allocation> freed;  // newest last; their pages stay without access
unsigned counter = 0;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

const char *kind_text(Kind kind) {
    switch (kind) {
        case Kind::managed: return "managed ";
        case Kind::pinned: return "pinned host ";
        case Kind::registered: return "registered host ";
        case Kind::module_data: return "module variable ";
        default: return "";
    }
}
}  // namespace

void *reserve(size_t bytes) {
    void *result =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return result == MAP_FAILED ? nullptr : result;
}

void fill_poison(void *to, size_t bytes) {
    auto *p = static_cast<char *>(to);
    uint32_t words[2] = {poison_word, poison_word};
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) memcpy(p + i, words, 8);
    memcpy(p + i, words, bytes - i);
}

const std::map<uintptr_t, std::unique_ptr<Allocation>> &allocations() { return live; }

Allocation *find_allocation(uintptr_t address) {
    auto above = live.upper_bound(address);
    if (above == live.begin()) return nullptr;
    Allocation *candidate = std::prev(above)->second.get();
    return address - candidate->base < candidate->bytes ? candidate : nullptr;
}

const Allocation *find_freed(uintptr_t address) {
    for (auto old = freed.rbegin(); old != freed.rend(); ++old)
        if (address >= old->base && address < old->base + old->bytes) return &*old;
    return nullptr;
}

std::string describe_address(uintptr_t address, size_t bytes) {
    auto name = [](const Allocation &a) {
        return text("%zu-byte %sallocation %u of device %d", a.bytes, kind_text(a.kind), a.number, a.device);
    };
    std::string where = text("0x%llx, ", static_cast<unsigned long long>(address));
    if (Allocation *inside = find_allocation(address)) {
        size_t offset = address - inside->base;
        if (offset + bytes > inside->bytes)
            return where + text("%zu bytes past the end of the %s", offset + bytes - inside->bytes,
                                name(*inside).c_str());
        return where + text("byte %zu of the %s", offset, name(*inside).c_str());
    }
    if (const Allocation *old = find_freed(address))
        return where + text("byte %zu of the freed %s", static_cast<size_t>(address - old->base), name(*old).c_str());
    auto above = live.upper_bound(address);
    const Allocation *after = above == live.end() ? nullptr : above->second.get();
    const Allocation *before = above == live.begin() ? nullptr : std::prev(above)->second.get();
    constexpr uintptr_t near = 1 << 20;
    uintptr_t to_before = before ? address - (before->base + before->bytes) : ~uintptr_t{0};
    uintptr_t to_after = after ? after->base - address : ~uintptr_t{0};
    if (before && to_before < near && to_before <= to_after)
        return where + text("%zu bytes after the %s", static_cast<size_t>(to_before), name(*before).c_str());
    if (after && to_after < near)
        return where + text("%zu bytes before the %s", static_cast<size_t>(to_after), name(*after).c_str());
    if (address < page_bytes) return where + "a null pointer";
    return where + "which is no device memory";
}

Allocation *allocate(Kind kind, size_t bytes, DeviceContext *context, int device) {
    auto allocation = std::make_unique<Allocation>();
    size_t room = round_up(bytes, alignment);
    size_t pages = round_up(room, page_bytes);
    char *mapping = static_cast<char *>(reserve(pages + page_bytes));
    if (!mapping) return nullptr;
    mprotect(mapping + pages, page_bytes, PROT_NONE);
    allocation->mapping = mapping;
    allocation->mapping_bytes = pages + page_bytes;
    allocation->base = reinterpret_cast<uintptr_t>(mapping + pages - room);
    allocation->bytes = bytes;
    allocation->kind = kind;
    allocation->context = context;
    allocation->device = device;
    allocation->number = ++counter;
    auto *start = reinterpret_cast<char *>(allocation->base);
    if (bytes <= poisoned_limit) fill_poison(start, bytes);
    memset(start + bytes, canary, room - bytes);
    if (options().check_memory && kind == Kind::device)  // the host writes to the other kinds unseen
        allocation->written = static_cast<uint8_t *>(reserve(bytes));
    Allocation *result = allocation.get();
    live[result->base] = std::move(allocation);
    return result;
}

Allocation *adopt(Kind kind, void *base, size_t bytes, DeviceContext *context, int device) {
    auto allocation = std::make_unique<Allocation>();
    allocation->base = reinterpret_cast<uintptr_t>(base);
    allocation->bytes = bytes;
    allocation->kind = kind;
    allocation->context = context;
    allocation->device = device;
    allocation->number = ++counter;
    Allocation *result = allocation.get();
    live[result->base] = std::move(allocation);
    return result;
}

bool release(Allocation *allocation) {
    bool clean = true;
    if (allocation->mapping) {
        auto *end = reinterpret_cast<uint8_t *>(allocation->base + allocation->bytes);
        auto *room = reinterpret_cast<uint8_t *>(allocation->mapping + allocation->mapping_bytes - page_bytes);
        for (auto *p = end; p < room; ++p)
            if (*p != canary) {
                say("out of bounds: something wrote %zu bytes after the %s (found when it was freed)",
                    static_cast<size_t>(p - end),
                    text("%zu-byte %sallocation %u of device %d", allocation->bytes, kind_text(allocation->kind),
                         allocation->number, allocation->device)
                        .c_str());
                clean = false;
                break;
            }
    }
    if (allocation->written) munmap(allocation->written, allocation->bytes);
    if (allocation->races) munmap(allocation->races, (allocation->bytes / 4 + 1) * race_cell_bytes());
    allocation->written = nullptr;
    allocation->races = nullptr;
    auto entry = live.find(allocation->base);
    if (allocation->mapping) {
        // The addresses stay reserved and without access for a while, so that a use after free faults.
        mmap(allocation->mapping, allocation->mapping_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        freed.push_back(*allocation);
        if (freed.size() > freed_limit) {
            munmap(freed.front().mapping, freed.front().mapping_bytes);
            freed.pop_front();
        }
    }
    live.erase(entry);
    return clean;
}

void mark_written(uintptr_t address, size_t bytes) {
    if (!options().check_memory) return;
    Allocation *allocation = find_allocation(address);
    if (allocation && allocation->written) memset(allocation->written + (address - allocation->base), 1, bytes);
}

void copy_written(uintptr_t to, uintptr_t from, size_t bytes) {
    if (!options().check_memory) return;
    Allocation *source = find_allocation(from), *target = find_allocation(to);
    if (!target || !target->written) return;
    uint8_t *out = target->written + (to - target->base);
    if (source && source->written)
        memmove(out, source->written + (from - source->base), bytes);
    else
        memset(out, 1, bytes);
}

}  // namespace emu
