// What this process may use of its CPU, beyond what the compiler knows of it.
#ifndef DPTRAIN_NATIVE_CPU_H
#define DPTRAIN_NATIVE_CPU_H

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Whether products can be computed in AMX tiles (native_tiles.h). Their 8 KB of registers take the system's permission,
// which is asked for here; it holds for all threads of the process and for those that it forks.
extern "C" bool dp_has_tiles() {
#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
    const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

#endif
