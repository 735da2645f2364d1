// Context switch between the stacks of CUDA threads: no system call, no signal mask, only the registers that the
// calling convention says a function must preserve.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT 1
#endif

#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

#ifdef EMULATOR_UCONTEXT
// The portable way, for other processors: each switch is a system call.
struct Context {
    ucontext_t ucontext;
};

inline void switch_context(Context &from, Context &to) { swapcontext(&from.ucontext, &to.ucontext); }

inline void make_context(Context &context, char *stack, size_t bytes, void (*entry)()) {
    getcontext(&context.ucontext);
    context.ucontext.uc_stack.ss_sp = stack;
    context.ucontext.uc_stack.ss_size = bytes;
    context.ucontext.uc_link = nullptr;
    makecontext(&context.ucontext, entry, 0);
}
#else
struct Context {
    void *stack_pointer = nullptr;
};

extern "C" void emu_switch_stack(void **save, void *load) __attribute__((visibility("hidden")));

inline void switch_context(Context &from, Context &to) { emu_switch_stack(&from.stack_pointer, to.stack_pointer); }

// Prepares a stack so that the first switch to it "returns" into entry.
inline void make_context(Context &context, char *stack, size_t bytes, void (*entry)()) {
    auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    auto *slots = reinterpret_cast<uint64_t *>(top);
#if defined(__x86_64__)
    // entry expects the alignment that a call leaves: 8 modulo 16, above it a null return address.
    slots -= 1;
    slots[0] = 0;
    *--slots = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < 6; ++i) *--slots = 0;  // rbp rbx r12-r15
#else
    for (int i = 0; i < 20; ++i) *--slots = 0;  // x19-x28, x29, x30, d8-d15
    slots[11] = reinterpret_cast<uint64_t>(entry);
#endif
    context.stack_pointer = slots;
}
#endif

}  // namespace emu
