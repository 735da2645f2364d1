// Both blocks of a cluster copy 8 rows of a (12, 64) matrix for each other by a tensor map, and store 16 rows of 64 as they lie
// in the matrix: zeros behind the last one. The map is a parameter, or lies in global memory. Where an element lies is written down as in the PTX ISA's figure of
// 128-byte swizzling. Compile for sm_90a.
//
// `bug` is the number of a planted bug (TENSOR_MAP_BUGS of bugs.py), 0 for none.
enum Bug {
    NONE, FEWER_BYTES, MORE_BYTES, NOTHING_EXPECTED, NO_WAIT, OTHER_PARITY, MISPLACED, NO_MAP, OUTSIDE_CLUSTER, LEAVES_FIRST,
    NO_BARRIER, LEAVES_BEFORE_ARRIVALS, STILL_READ, NOT_ACQUIRED
};
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64)
    tiles(const __grid_constant__ TensorMap map, const TensorMap *stored, unsigned short *y, int bug) {
    extern __shared__ __align__(1024) char shared[];
    const unsigned given = (unsigned)__cvta_generic_to_shared(shared), begin = (given + 1023) / 1024 * 1024;
    char *const rows = shared + (begin - given);
    const unsigned rank = blockIdx.x % 2, barrier = begin + 2048, done = barrier + 8;
    for (int i = threadIdx.x; i < 512; i += 64) ((int *)rows)[i] = 0;
    __syncthreads();
    int seen = 0;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(1) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(done), "r"(64) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    if (bug == STILL_READ && threadIdx.x == 40) seen = ((volatile int *)rows)[40];
    if (threadIdx.x == 0) {
        const int bytes = bug == FEWER_BYTES ? 1536 : bug == MORE_BYTES || bug == LEAVES_FIRST ? 4096 : 2048;
        if (bug == NOTHING_EXPECTED)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
        else
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        const bool is_stored = bug == NONE || bug == NOT_ACQUIRED;
        const char *const place = (const char *)(is_stored ? stored : &map) + (bug == NO_MAP ? 64 : 0);
        if (bug == NONE) asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(place) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                     "[%1, {%2, %3}], [%4], %5;" ::"r"(begin + rank * 1024 + (bug == MISPLACED ? 128 : 0)),
                     "l"(place), "r"(0), "r"((int)rank * 8), "r"(barrier + (bug == NO_BARRIER ? 16 : 0)),
                     "h"((unsigned short)(bug == OUTSIDE_CLUSTER ? 7 : 3))
                     : "memory");
    }
    if (bug == LEAVES_FIRST) return;
    if (bug != NO_WAIT) {
        unsigned ended;
        do {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                         "selp.b32 %0, 1, 0, p; }"
                         : "=r"(ended) : "r"(barrier), "r"(bug == OTHER_PARITY ? 1 : 0) : "memory");
        } while (!ended);
    }
    for (int row = 0; row < 16; ++row) {
        const int chunk = threadIdx.x / 8 ^ row % 8;
        y[(rank * 16 + row) * 64 + threadIdx.x] = *(unsigned short *)(rows + row * 128 + chunk * 16 + threadIdx.x % 8 * 2);
    }
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(done), "r"(1 - rank));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
    if (seen) y[0] = 1;
    if (bug == LEAVES_BEFORE_ARRIVALS) return;
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
