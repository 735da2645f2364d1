// Kernels of gpu_probe.py: what clusters, barriers and launches cost on a GPU.
//
// Every wait ends by the multiprocessor's clock, whatever other blocks do, so that nothing can hang the GPU. Clusters of 8
// and 16 blocks are the same code twice, for a kernel's cluster size is part of it. `box` and such are shared memory; a
// remote one is another block's of the same cluster.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

#ifdef DPTRAIN_EMULATOR
// No inline assembly there; and a plain read would not let other blocks run.
__device__ unsigned long long nanoseconds() { return (unsigned long long)clock64(); }
__device__ unsigned seen(unsigned *counter) {
    __nanosleep(100);
    return atomicAdd(counter, 0u);
}
__device__ void settled(int) {}
#else
__device__ unsigned long long nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
__device__ unsigned seen(unsigned *counter) { return *(volatile unsigned *)counter; }
// What the value needs is done before the clock that is read next.
__device__ void settled(int value) { asm volatile("" : : "r"(value) : "memory"); }
#endif

extern "C" __global__ void empty() {}

// Keeps a multiprocessor busy, so that its clock rises.
extern "C" __global__ void spin(long long cycles) {
    const long long begun = clock64();
    while (clock64() - begun < cycles) __nanosleep(500);
}

// Shows how often it ran.
extern "C" __global__ void add_one(unsigned *x) {
    if (blockIdx.x == 0 && threadIdx.x == 0) x[0] += 1;
}

// `repeats` barriers of all blocks, which must fit the GPU at once. Block 0 writes cycles and nanoseconds. With `check`,
// each barrier must also make the neighbour's last value visible. failed: 1 a wait lasted `limit` cycles, 2 an old value.
extern "C" __global__ void grid_barrier(unsigned *counter, unsigned *failed, unsigned *values, int repeats, int check,
                                        long long limit, long long *cycles, unsigned long long *ns) {
    __shared__ int stop;
    if (threadIdx.x == 0) stop = 0;
    __syncthreads();
    const long long clock_start = clock64();
    const unsigned long long ns_start = nanoseconds();
    for (int r = 0; r < repeats; ++r) {
        if (check && threadIdx.x == 0) atomicExch(&values[blockIdx.x], (unsigned)r + 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            const unsigned wanted = (unsigned)(r + 1) * gridDim.x;
            __threadfence();
            atomicAdd(counter, 1u);
            const long long begun = clock64();
            while (seen(counter) < wanted) {
                if (clock64() - begun > limit) {
                    atomicExch(failed, 1u);
                    stop = 1;
                    break;
                }
            }
            __threadfence();
            if (check && seen(&values[(blockIdx.x + 1) % gridDim.x]) < (unsigned)r + 1) atomicExch(failed, 2u);
        }
        __syncthreads();
        if (stop) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        cycles[0] = clock64() - clock_start;
        ns[0] = nanoseconds() - ns_start;
    }
}

#ifndef NO_CLUSTERS
// out: each block's x plus 1000 times that of the opposite block; ranks: rank in the cluster + 256 times its size.
__device__ void exchange(int *box, const int *x, int *out, int *ranks) {
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), size = cluster.num_blocks();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    box[threadIdx.x] = x[at];
    cluster.sync();
    const int *opposite = cluster.map_shared_rank(box, size - 1 - rank);
    out[at] = x[at] + 1000 * opposite[threadIdx.x];
    if (threadIdx.x == 0) ranks[blockIdx.x] = (int)(rank + 256 * size);
    cluster.sync();  // nobody leaves while others still read
}

// peak: most clusters that were on the GPU at the same time, if all stay `stay` cycles.
__device__ void resident(unsigned *live, unsigned *peak, long long stay) {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    if (cluster.block_rank() == 0 && threadIdx.x == 0) {
        atomicMax(peak, atomicAdd(live, 1u) + 1);
        const long long begun = clock64();
        while (clock64() - begun < stay) __nanosleep(500);
        atomicSub(live, 1u);
    }
    cluster.sync();
}

// `repeats` cluster.sync(); the first block writes cycles and nanoseconds.
__device__ void sync_cost(int repeats, long long *cycles, unsigned long long *ns) {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const long long clock_start = clock64();
    const unsigned long long ns_start = nanoseconds();
    for (int r = 0; r < repeats; ++r) cluster.sync();
    if (cluster.block_rank() == 0 && threadIdx.x == 0) {
        cycles[0] = clock64() - clock_start;
        ns[0] = nanoseconds() - ns_start;
    }
    cluster.sync();
}

// `repeats` times: every thread writes a number into the next block's shared memory, all synchronise, each adds 1 to what
// came. Two boxes, so that one barrier a turn is enough. out: the number at the end.
__device__ void exchange_cost(int *boxes, int repeats, int *out, long long *cycles, unsigned long long *ns) {
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), size = cluster.num_blocks();
    int value = (int)(rank * blockDim.x + threadIdx.x);
    int *next = cluster.map_shared_rank(boxes, (rank + 1) % size);
    cluster.sync();
    const long long clock_start = clock64();
    const unsigned long long ns_start = nanoseconds();
    for (int r = 0; r < repeats; ++r) {
        const int at = (r & 1) * (int)blockDim.x + (int)threadIdx.x;
        next[at] = value;
        cluster.sync();
        value = boxes[at] + 1;
    }
    if (rank == 0 && threadIdx.x == 0) {
        cycles[0] = clock64() - clock_start;
        ns[0] = nanoseconds() - ns_start;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
    cluster.sync();
}

// One thread follows a chain of `repeats` loads through the shared memory of the last block: the latency of one.
__device__ void load_cost(int *chain, int repeats, int *out, long long *cycles, unsigned long long *ns) {
    cg::cluster_group cluster = cg::this_cluster();
    const int n = (int)blockDim.x;
    chain[threadIdx.x] = ((int)threadIdx.x + 33) % n;
    cluster.sync();
    if (cluster.block_rank() == 0 && threadIdx.x == 0) {
        const int *remote = cluster.map_shared_rank(chain, cluster.num_blocks() - 1);
        int at = 0;
        const long long clock_start = clock64();
        const unsigned long long ns_start = nanoseconds();
        for (int r = 0; r < repeats; ++r) at = remote[at];
        settled(at);
        cycles[0] = clock64() - clock_start;
        ns[0] = nanoseconds() - ns_start;
        out[0] = at;
    }
    cluster.sync();
}

#define CLUSTER_KERNELS(SIZE)                                                                                          \
    extern "C" __global__ void __cluster_dims__(SIZE, 1, 1) exchange_##SIZE(const int *x, int *out, int *ranks) {      \
        __shared__ int box[256];                                                                                       \
        exchange(box, x, out, ranks);                                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(SIZE, 1, 1)                                                            \
        resident_##SIZE(unsigned *live, unsigned *peak, long long stay) {                                              \
        resident(live, peak, stay);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(SIZE, 1, 1)                                                            \
        sync_cost_##SIZE(int repeats, long long *cycles, unsigned long long *ns) {                                     \
        sync_cost(repeats, cycles, ns);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(SIZE, 1, 1)                                                            \
        exchange_cost_##SIZE(int repeats, int *out, long long *cycles, unsigned long long *ns) {                       \
        __shared__ int boxes[512];                                                                                     \
        exchange_cost(boxes, repeats, out, cycles, ns);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(SIZE, 1, 1)                                                            \
        load_cost_##SIZE(int repeats, int *out, long long *cycles, unsigned long long *ns) {                           \
        __shared__ int chain[256];                                                                                     \
        load_cost(chain, repeats, out, cycles, ns);                                                                    \
    }

CLUSTER_KERNELS(8)
CLUSTER_KERNELS(16)
#endif
