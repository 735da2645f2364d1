// Reads the operand of a faulting instruction; safe in a signal handler.
#pragma once

#include <csignal>
#include <cstdint>

namespace emu {

struct Fault {
    uintptr_t address;   // that was accessed
    uintptr_t pc;        // of the instruction, 0 where this processor's is not known
    unsigned alignment;  // bytes that the address had to be a multiple of and is not; 0 where that is not why
};

Fault fault_of(const siginfo_t &info, const void *context);

}  // namespace emu
