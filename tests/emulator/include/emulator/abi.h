// What a compiled kernel and the emulated driver know of each other.
//
// A "cubin" of the emulator is a shared object for the host. It links libcuda.so.1, registers its kernels from a
// static constructor while cuModuleLoadData opens it, and calls the functions below whenever a CUDA thread has to
// wait, to be checked, or to reach another block. Everything here is plain C so that both sides stay independent
// of the device header's own types.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct emu_uint3 {
    unsigned x, y, z;
};

// The part of a running CUDA thread that device code reads directly (threadIdx and friends are macros over it).
// The driver's Fiber derives from it.
struct EmuThread {
    emu_uint3 thread_idx, block_idx, block_dim, grid_dim;
    emu_uint3 cluster_dim, cluster_idx, block_in_cluster;  // cluster_dim is (1,1,1) for an ordinary launch
    unsigned cluster_rank, cluster_size;
    unsigned linear;  // index of the thread in its block, x fastest
    unsigned lane, warp;
    uint64_t cluster_token;  // of the last barrier_arrive
    unsigned cooperative;  // the launch allows grid barriers
    char *shared_static;   // this block's copy of every __shared__ variable of the module
    char *shared_dynamic;  // this block's `extern __shared__` bytes
    unsigned dynamic_bytes;
};

// One __shared__ variable (or group declared together): its place in the module's static shared area.
struct EmuSharedSlot {
    const char *name;
    uint32_t size, align;
    uint32_t id;  // the number the nvcc stand-in gave to the declaration
    uint32_t offset;
    struct EmuSharedSlot *next;
};

// What the stand-in's trampoline tells about one __global__ function.
struct EmuKernelInfo {
    const char *name;        // as written in the source
    void *function;          // address of the kernel itself: its symbol is the name cuModuleGetFunction looks up
    void (*entry)(const char *arguments);
    const uint32_t *offsets;  // of each parameter in the packed argument buffer
    const uint32_t *sizes;
    uint32_t parameters;
    uint32_t argument_bytes;  // end of the last parameter
    uint32_t max_threads;     // __launch_bounds__, 0 when absent
    emu_uint3 cluster;        // __cluster_dims__, zeros when absent
    const uint32_t *shared_ids;  // EmuSharedSlot ids this kernel can reach
    uint32_t shared_count;
    const char *lockstep;  // a volatile pointer to shared memory that it uses without __syncwarp, null for none
};

struct EmuSite {
    const char *file;
    int line;
};

enum EmuScope { EMU_WARP = 0, EMU_BLOCK = 1, EMU_CLUSTER = 2, EMU_GRID = 3 };
enum EmuReduce { EMU_COUNT = 0, EMU_AND = 1, EMU_OR = 2 };
enum EmuFactor { EMU_BF16, EMU_F16, EMU_TF32 };
enum EmuAccess { EMU_READ = 0, EMU_WRITE = 1, EMU_ATOMIC = 2 };

#ifdef __cplusplus
extern "C" {
#endif

// initial-exec: the variable lives in libcuda.so.1, which the process loads before any module, so a kernel reads it
// with one instruction instead of a call to __tls_get_addr.
extern __thread struct EmuThread *emu_self __attribute__((tls_model("initial-exec")));

void emu_register_kernel(const struct EmuKernelInfo *info);
void emu_register_slot(struct EmuSharedSlot *slot);

// __syncthreads and its counting variants: the value is the count, and or or of `predicate` over the block.
int emu_block_barrier(enum EmuReduce reduce, int predicate, struct EmuSite site);
void emu_warp_barrier(unsigned mask, struct EmuSite site);
// Every lane of `mask` hands in a pointer; the last one to arrive runs `combine` over all of them, then all go on.
void emu_warp_collective(unsigned mask, void *mine, void (*combine)(void **lanes, unsigned mask), const char *what,
                         struct EmuSite site);
// Ends the launch: a fragment's place in memory or the distance of its rows, in bytes, is not aligned.
void emu_misaligned_matrix(const void *place, unsigned long stride, const char *what, struct EmuSite site);
uint64_t emu_barrier_arrive(enum EmuScope scope, struct EmuSite site);
void emu_barrier_wait(enum EmuScope scope, uint64_t token, struct EmuSite site);
unsigned emu_active_mask(void);

// What cuTensorMapEncodeTiled makes here, of a matrix of 2-byte numbers in the 128-byte swizzle.
struct EmuTensorMap {
    char name[16];
    uint64_t address, size[2], pitch;
    uint32_t box[2];
};
static const char emu_tensor_map_name[16] = "tensor map of e";

char *emu_map_shared(char *address, unsigned rank);  // the same variable in another block of the cluster
int emu_is_shared(const void *address);
void emu_fence(void);
void emu_fence_block(void);  // that other blocks need not notice
void emu_spin(void);  // called by atomics: a thread that spins lets others run
void emu_trap(struct EmuSite site);
void emu_assert_failed(const char *expression, const char *function, struct EmuSite site);

void emu_async_copy(void *shared, const void *global, unsigned bytes, unsigned zero_fill);
void emu_async_commit(void);
void emu_async_wait(unsigned pending);

// What stands for inline assembly (nvcc.py). `shared` is an address as __cvta_generic_to_shared makes it; ldmatrix sets
// `count` registers, mma.sync adds to four sums, cp.async takes `size` of `bytes` from its source and zeros.
void emu_ldmatrix(unsigned *registers, unsigned count, int transposed, unsigned shared, struct EmuSite site);
void emu_mma(float *sums, const unsigned *a, const unsigned *b, enum EmuFactor type, struct EmuSite site);
void emu_cp_async(unsigned shared, const void *global, unsigned bytes, unsigned size, struct EmuSite site);
void emu_mbarrier_init(unsigned shared, unsigned arrivals, struct EmuSite site);
void emu_mbarrier_arrive(unsigned shared, struct EmuSite site);
void emu_mbarrier_wait(unsigned shared, unsigned parity, struct EmuSite site);
void emu_mbarrier_expect(unsigned shared, unsigned bytes, struct EmuSite site);
unsigned emu_map_address(unsigned shared, unsigned rank, struct EmuSite site);
// A tile of a matrix of 2-byte numbers, which begins at (x, y); `mask` are the blocks that get it, -1 for this one alone.
void emu_bulk_tensor(unsigned shared, const void *map, int x, int y, unsigned barrier, int mask, struct EmuSite site);
void emu_proxy_fence(void);
void emu_acquire_map(const void *map, struct EmuSite site);  // by this thread, before it copies by a map in global memory
void emu_wgmma_fence(struct EmuSite site);
void emu_wgmma_commit(struct EmuSite site);
void emu_wgmma_wait(unsigned pending, struct EmuSite site);
// Of `columns` columns; `sums` points at half as many registers, a and b are descriptors of matrices in shared memory.
void emu_wgmma(float *const *sums, unsigned columns, uint64_t a, uint64_t b, int a_mn_major, int b_mn_major,
               enum EmuFactor type, struct EmuSite site);

// Checked builds only: one access that the compiler did not instrument itself.
void emu_check(const volatile void *address, size_t bytes, enum EmuAccess kind);

#ifdef __cplusplus
}
#endif
