// Sums: by shuffles within a warp, over a block, by cooperative-groups tiles; and the two-pass sum over a grid.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

__device__ float block_sum(float value) {
    __shared__ float parts[32];
    for (int d = 16; d > 0; d /= 2) value += __shfl_down_sync(0xffffffffu, value, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32)
        for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
    return value;
}

// out: one partial sum per block.
extern "C" __global__ void partial_sums(const float *x, float *out, int n) {
    float value = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) value += x[i];
    value = block_sum(value);
    if (threadIdx.x == 0) out[blockIdx.x] = value;
}

// One launch: the block that finishes last adds the partial sums up.
extern "C" __global__ void last_block_sum(const float *x, float *partial, unsigned *finished, float *out, int n) {
    __shared__ bool last;
    float value = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) value += x[i];
    value = block_sum(value);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = value;
        __threadfence();
        last = atomicAdd(finished, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.0f;
        for (unsigned b = 0; b < gridDim.x; ++b) sum += ((volatile float *)partial)[b];
        *out = sum;
    }
}

// Eight lanes a tile; out holds sum and maximum per tile.
extern "C" __global__ void tile_sums(const int *x, int *sums, int *maxima) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int value = x[blockIdx.x * blockDim.x + threadIdx.x];
    int sum = cg::reduce(tile, value, cg::plus<int>());
    int most = cg::reduce(tile, value, cg::greater<int>());
    if (tile.thread_rank() == 0) {
        int at = blockIdx.x * tile.meta_group_size() + tile.meta_group_rank();
        sums[at] = sum;
        maxima[at] = most;
    }
}

// Votes of each warp: ballot, any, all, and how many threads of the block agree.
extern "C" __global__ void votes(const int *x, unsigned *ballots, int *any, int *all, int *count) {
    int i = threadIdx.x, yes = x[i] > 0;
    unsigned ballot = __ballot_sync(0xffffffffu, yes);
    int some = __any_sync(0xffffffffu, yes), every = __all_sync(0xffffffffu, yes);
    int agree = __syncthreads_count(yes);
    if (i % 32 == 0) {
        ballots[i / 32] = ballot;
        any[i / 32] = some;
        all[i / 32] = every;
    }
    if (i == 0) *count = agree;
}
