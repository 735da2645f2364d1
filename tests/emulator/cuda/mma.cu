// One warp's mma.sync, whose lanes take their elements as the PTX ISA's figures of fragments say, and ldmatrix beside them.
__device__ unsigned pair(const unsigned short *at, int step) { return at[0] | (unsigned)at[step] << 16; }

// c_16x8 += a_16x16 b_16x8, all row-major. Swapped, two registers of a have each other's elements, as never should be.
#define MMA_16(name, type)                                                                                               \
    extern "C" __global__ void name(const unsigned short *a, const unsigned short *b, float *c, int swapped) {           \
        int lane = threadIdx.x, group = lane / 4, member = lane % 4;                                                     \
        const unsigned short *row = a + group * 16 + member * 2, *column = b + member * 2 * 8 + group;                   \
        unsigned x[4] = {pair(row, 1), pair(row + 8 * 16, 1), pair(row + 8, 1), pair(row + 8 * 16 + 8, 1)};              \
        unsigned second = swapped ? x[2] : x[1], third = swapped ? x[1] : x[2];                                          \
        float *sums = c + group * 8 + member * 2;                                                                        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                      \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[64]), "+f"(sums[65])                                      \
                     : "r"(x[0]), "r"(second), "r"(third), "r"(x[3]), "r"(pair(column, 8)), "r"(pair(column + 64, 8)));  \
    }
MMA_16(mma_bf16, "bf16")
MMA_16(mma_half, "f16")

// c_16x8 = a_16x8 b_8x8 + c; what TF32 does not hold is cut off.
extern "C" __global__ void mma_tf32(const unsigned *a, const unsigned *b, float *c, int swapped) {
    int lane = threadIdx.x, group = lane / 4, member = lane % 4;
    const unsigned *row = a + group * 8 + member, *column = b + member * 8 + group;
    float *sums = c + group * 8 + member * 2, found[4];
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};"
                 : "=f"(found[0]), "=f"(found[1]), "=f"(found[2]), "=f"(found[3])
                 : "r"(row[0]), "r"(row[swapped ? 4 : 64]), "r"(row[swapped ? 64 : 4]), "r"(row[68]), "r"(column[0]),
                   "r"(column[32]), "f"(sums[0]), "f"(sums[1]), "f"(sums[64]), "f"(sums[65]));
    sums[0] = found[0], sums[1] = found[1], sums[64] = found[2], sums[65] = found[3];
}

// Four matrices of 8 x 8 lie one below the other. Lane, register: what x1, x2, x4 and x4.trans leave there, 13 in all.
extern "C" __global__ void ldmatrix_all(const uint4 *rows, unsigned *registers) {
    __shared__ __align__(16) uint4 matrices[32];
    unsigned at = (unsigned)__cvta_generic_to_shared(&matrices[threadIdx.x]), *r = registers + threadIdx.x * 13;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(at), "l"(rows + threadIdx.x) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[1]), "=r"(r[2]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[3]), "=r"(r[4]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8])
                 : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12])
                 : "r"(at));
}

// Copies of 4, 8 and 16 bytes: `taken` come from x, the rest are zeros.
extern "C" __global__ void cp_async_sizes(const float *x, float *y, int taken) {
    __shared__ __align__(16) float to[12];
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(x), "r"(min(taken, 4)) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at + 8), "l"(x), "r"(min(taken, 8)) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + 16), "l"(x), "r"(taken) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
    y[0] = to[0], y[1] = to[2], y[2] = to[3];
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (int i = 4; i < 8; ++i) y[i - 1] = to[i];
}
