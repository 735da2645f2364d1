// c_64x128 = a_64xK b_Kx128 by one warpgroup, whose stages a fifth warp fills through two mbarriers each. Where an element of
// a factor lies in shared memory is written down as in the PTX ISA's figures of 128-byte swizzling, once for K-major
// factors and once for MN-major ones, and not as the emulator or kernels/ compute it. Compile for sm_90a.
//
// `bug` is the number of a planted bug (WARPGROUP_BUGS of bugs.py), 0 for none.
enum Bug {
    NONE, OTHER_SWIZZLE, NOT_SWIZZLED, WRONG_STRIDE, WRONG_LEADING_STRIDE, WITHIN_A_PATTERN, NO_PROXY_FENCE, NO_WAIT,
    NO_COMMIT, RELEASED_EARLY, WRONG_PHASE, WRONG_COPIERS_PHASE, TOO_MANY_ARRIVALS, TOO_FEW_ARRIVALS, OVERWRITTEN, NO_FENCE,
    USED_EARLY, UNALIGNED, OUTSIDE, NO_BARRIER, RESERVED_BITS, LEADING_STRIDE_OF_NO_PANEL
};

#define TEN(tens) \
    "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens "8,%" #tens "9,"
#define EIGHT(i)                                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define MULTIPLY(type)                                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" TEN() TEN(1) TEN(2) TEN(3)     \
                 TEN(4) TEN(5) "%60,%61,%62,%63}, %64, %65, 1, 1, 1, %66, %67;"                                  \
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)          \
                 : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN))

template <bool BF16, bool A_MN, bool B_MN>
__device__ void multiply(float (&d)[64], unsigned long long a, unsigned long long b) {
    if constexpr (BF16) MULTIPLY("bf16");
    else MULTIPLY("f16");
}

__device__ void wait(unsigned barrier, int parity) {
    unsigned ended;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    } while (!ended);
}

// The byte of an element: a swizzle atom is 8 rows of 8 chunks of 16 bytes, in whose row r chunk c lies at c ^ r.
template <bool MN_MAJOR> __device__ int place(int mn, int k, int bug) {
    const int row = MN_MAJOR ? k : mn, chunk = MN_MAJOR ? mn % 64 / 8 : k / 8, in_chunk = MN_MAJOR ? mn % 8 : k % 8;
    const int atom = MN_MAJOR ? mn / 64 * 8 + k / 8 : mn / 8;
    return atom * 1024 + row % 8 * 128 + (bug == NOT_SWIZZLED ? chunk : chunk ^ row % 8) * 16 + in_chunk * 2;
}

template <bool BF16, bool A_MN, bool B_MN>
__device__ void product(const unsigned short *a, const unsigned short *b, float *c, int steps, int bug) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int PART_A = 64 * 128, PART_B = 128 * 128, STAGE = PART_A + PART_B;
    const unsigned given = (unsigned)__cvta_generic_to_shared(shared), begin = (given + 1023) / 1024 * 1024;
    char *const stages = shared + (begin - given);
    const unsigned full = begin + 2 * STAGE + (bug == UNALIGNED ? 4 : 0), empty = full + 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (int stage = 0; stage < 2; ++stage) {
            const int arrivals = bug == TOO_MANY_ARRIVALS ? 33 : bug == TOO_FEW_ARRIVALS ? 31 : 32;
            if (bug != NO_BARRIER) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + stage * 8), "r"(arrivals) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + stage * 8), "r"(4) : "memory");
            if (bug == OVERWRITTEN) *(volatile int *)(stages + 2 * STAGE) = 0;
        }
    __syncthreads();
    if (warp == 4) {
        for (int step = 0; step < steps; ++step) {
            char *part_a = stages + step % 2 * STAGE, *part_b = part_a + PART_A;
            wait(empty + step % 2 * 8, (step / 2 + (bug == WRONG_COPIERS_PHASE ? 0 : 1)) % 2);
            for (int i = lane; i < 64 * 64; i += 32)
                *(unsigned short *)(part_a + place<A_MN>(i / 64, i % 64, bug)) = a[i / 64 * steps * 64 + step * 64 + i % 64];
            for (int i = lane; i < 64 * 128; i += 32)
                *(unsigned short *)(part_b + place<B_MN>(i % 128, i / 128, bug)) = b[(step * 64 + i / 128) * 128 + i % 128];
            if (bug != NO_PROXY_FENCE) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(full + step % 2 * 8) : "memory");
        }
        return;
    }
    float d[64];
    for (int i = 0; i < 64; ++i) d[i] = 0;
    for (int step = 0; step < steps; ++step) {
        wait(full + step % 2 * 8, (step / 2 + (bug == WRONG_PHASE ? 1 : 0)) % 2);
        if (bug != NO_FENCE) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < 64; k += 16) {
            auto descriptor = [&](unsigned start, unsigned panels) {
                start += bug == WITHIN_A_PATTERN ? 128 : bug == OUTSIDE ? 200 * 1024 : 0;
                const unsigned long long stride = bug == WRONG_STRIDE ? 512 : 1024, swizzle = bug == OTHER_SWIZZLE ? 2 : 1;
                return swizzle << 62 | (bug == RESERVED_BITS ? 1ull << 53 : 0) | stride / 16 << 32 |
                       (unsigned long long)(panels / 16) << 16 | (start & 0x3ffff) / 16;
            };
            const unsigned part_a = begin + step % 2 * STAGE, part_b = part_a + PART_A;
            const int panel = bug == WRONG_LEADING_STRIDE ? 1024 : bug == LEADING_STRIDE_OF_NO_PANEL ? 512 : 8192;
            multiply<BF16, A_MN, B_MN>(d, descriptor(part_a + (A_MN ? k * 128 : k * 2), panel),
                                       descriptor(part_b + (B_MN ? k * 128 : k * 2), panel));
        }
        if (bug != NO_COMMIT) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        auto release = [&] {
            if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + step % 2 * 8) : "memory");
        };
        if (bug == RELEASED_EARLY) release();
        if (bug == USED_EARLY) d[0] += 1.0f;
        if (bug == NO_WAIT) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(1) : "memory");
        else asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
        if (bug != RELEASED_EARLY) release();
    }
    for (int i = 0; i < 64; ++i)
        c[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

#define KERNEL(name, BF16, A_MN, B_MN)                                                                          \
    extern "C" __global__ void __launch_bounds__(160)                                                           \
        name(const unsigned short *a, const unsigned short *b, float *c, int steps, int bug) {                  \
        product<BF16, A_MN, B_MN>(a, b, c, steps, bug);                                                         \
    }
KERNEL(wgmma_bf16_k_k, true, false, false)
KERNEL(wgmma_bf16_mn_mn, true, true, true)
KERNEL(wgmma_half_k_mn, false, false, true)
KERNEL(wgmma_half_mn_k, false, true, false)
