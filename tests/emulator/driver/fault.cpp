// What address a faulting instruction wanted, where the kernel does not say it.
//
// x86-64 reports a vector load or store that is not aligned as a general-protection fault, and so an address that no
// pointer can have (bits 47 to 63 differ); neither comes with the address. Both are in the instruction's operand.
#include "fault.hpp"

#include <csignal>

#include <ucontext.h>

namespace emu {

#if defined(__x86_64__)
namespace {
constexpr int general_protection = 13;

// The operand in memory of the instruction at rip, and its size if it is a vector.
bool memory_operand(const greg_t *registers, uintptr_t &address, unsigned &bytes) {
    static constexpr int numbers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                        REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    auto value = [&](unsigned n) { return static_cast<uintptr_t>(registers[numbers[n]]); };
    const auto *p = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
    unsigned r_index = 0, r_base = 0, immediate = 0;
    bytes = 16;
    while (*p == 0x66 || *p == 0xF2 || *p == 0xF3 || *p == 0x2E || *p == 0x3E) ++p;
    if (*p == 0xC5) {  // VEX of two bytes
        if (p[1] & 4) bytes = 32;
        p += 3;
    } else if (*p == 0xC4) {  // VEX of three bytes: inverted X and B, the map, L
        r_index = p[1] & 0x40 ? 0 : 8;
        r_base = p[1] & 0x20 ? 0 : 8;
        immediate = (p[1] & 0x1F) == 3;
        if (p[2] & 4) bytes = 32;
        p += 4;
    } else {
        if ((*p & 0xF0) == 0x40) {  // REX
            r_index = *p & 2 ? 8 : 0;
            r_base = *p & 1 ? 8 : 0;
            ++p;
        }
        if (*p == 0x0F) {
            ++p;
            immediate = *p == 0x3A;
            if (*p == 0x38 || *p == 0x3A) ++p;
        }
        ++p;
    }
    const unsigned mod = *p >> 6, rm = *p & 7;
    ++p;
    if (mod == 3) return false;
    address = 0;
    bool wide = mod == 2;  // a displacement of four bytes
    if (rm == 4) {
        const unsigned scale = *p >> 6, index = (*p >> 3 & 7) + r_index, base = *p & 7;
        ++p;
        if (index != 4) address += value(index) << scale;
        if (base == 5 && mod == 0) wide = true;
        else address += value(base + r_base);
    } else if (rm == 5 && mod == 0) {  // from the next instruction on
        wide = true;
        address += reinterpret_cast<uintptr_t>(p) + 4 + immediate;
    } else {
        address += value(rm + r_base);
    }
    if (wide) {
        int32_t displacement;
        __builtin_memcpy(&displacement, p, 4);
        address += static_cast<uintptr_t>(static_cast<intptr_t>(displacement));
    } else if (mod == 1) {
        address += static_cast<uintptr_t>(static_cast<intptr_t>(static_cast<int8_t>(*p)));
    }
    return true;
}
}  // namespace
#endif

Fault fault_of(const siginfo_t &info, const void *context) {
    Fault fault{reinterpret_cast<uintptr_t>(info.si_addr), 0, 0};
    [[maybe_unused]] const auto &machine = static_cast<const ucontext_t *>(context)->uc_mcontext;
#if defined(__x86_64__)
    fault.pc = static_cast<uintptr_t>(machine.gregs[REG_RIP]);
    unsigned bytes;
    if (info.si_signo == SIGSEGV && machine.gregs[REG_TRAPNO] == general_protection &&
        memory_operand(machine.gregs, fault.address, bytes)) {
        const auto top = static_cast<intptr_t>(fault.address) >> 47;
        if ((top == 0 || top == -1) && fault.address % bytes != 0) fault.alignment = bytes;
    }
#elif defined(__aarch64__)
    fault.pc = machine.pc;
    if (info.si_signo == SIGBUS && info.si_code == BUS_ADRALN) fault.alignment = 16;
#endif
    return fault;
}

}  // namespace emu
