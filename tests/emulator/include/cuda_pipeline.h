// cp.async: copies from global to shared memory that arrive at the wait, as late as the rules allow.
#pragma once

#include "emulator/device.h"

EMU_INLINE void __pipeline_memcpy_async(void *shared, const void *global, size_t bytes, size_t zero_fill = 0, EMU_SITE) {
    if (bytes != 4 && bytes != 8 && bytes != 16)
        emu_assert_failed("bytes == 4 || bytes == 8 || bytes == 16", "__pipeline_memcpy_async", emu_site);
    if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(global) % bytes)
        emu_assert_failed("both addresses are multiples of bytes", "__pipeline_memcpy_async", emu_site);
    emu_async_copy(shared, global, static_cast<unsigned>(bytes), static_cast<unsigned>(zero_fill));
}
EMU_INLINE void __pipeline_commit() { emu_async_commit(); }
EMU_INLINE void __pipeline_wait_prior(size_t pending) { emu_async_wait(static_cast<unsigned>(pending)); }
