// Barriers beyond a block: clusters with distributed shared memory, cooperative grids, and one made of atomics.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// Each block sums its part of x; every block of the cluster then reads the sums of all others.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_sum(const float *x, float *out, int *ranks) {
    __shared__ float parts[64];
    __shared__ float sum;
    cg::cluster_group cluster = cg::this_cluster();
    parts[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (unsigned i = 0; i < blockDim.x; ++i) sum += parts[i];
    }
    cluster.sync();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (unsigned r = 0; r < cluster.num_blocks(); ++r) total += *cluster.map_shared_rank(&sum, r);
        out[blockIdx.x] = total;
        ranks[blockIdx.x] = (int)cluster.block_rank();
    }
    cluster.sync();  // nobody leaves while others still read
}

// Blocks of a cluster add into the shared histogram of rank 0.
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_histogram(const int *x, int *bins, int n) {
    extern __shared__ int local[];
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x < 16) local[threadIdx.x] = 0;
    cluster.sync();
    int *target = cluster.map_shared_rank(local, 0);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&target[x[i]], 1);
    cluster.sync();
    if (cluster.block_rank() == 0 && threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

// Jacobi steps over a ring; each needs the neighbours' values of the step before. Cooperative launch.
extern "C" __global__ void grid_smooth(float *a, float *b, int n, int steps) {
    cg::grid_group grid = cg::this_grid();
    for (int s = 0; s < steps; ++s) {
        for (int i = (int)grid.thread_rank(); i < n; i += (int)grid.size())
            b[i] = 0.25f * a[(i + n - 1) % n] + 0.5f * a[i] + 0.25f * a[(i + 1) % n];
        grid.sync();
        float *other = a;
        a = b;
        b = other;
    }
}

// The same barrier by hand: a counter that all blocks of an ordinary launch raise and wait for.
extern "C" __global__ void counter_barrier(unsigned *counter, int *flags, int *out) {
    if (threadIdx.x == 0) {
        atomicExch(&flags[blockIdx.x], (int)blockIdx.x + 1);
        __threadfence();
        atomicAdd(counter, 1u);
        while (atomicAdd(counter, 0u) < gridDim.x) __nanosleep(20);
        int sum = 0;
        for (unsigned b = 0; b < gridDim.x; ++b) sum += atomicAdd(&flags[b], 0);
        out[blockIdx.x] = sum;
    }
}
