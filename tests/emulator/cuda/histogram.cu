// Histogram of bytes: counts of a block in shared memory, added to the result with global atomics.
extern "C" __global__ void histogram(const unsigned char *x, unsigned *bins, int n) {
    __shared__ unsigned local[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) local[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i]], 1u);
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x)
        if (local[b]) atomicAdd(&bins[b], local[b]);
}

// Every kind of atomic on one word each; the results do not depend on the order.
extern "C" __global__ void atomics(const int *x, int *results, float *sum, double *sum64, unsigned long long *tickets,
                                   int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&results[0], x[i]);
    atomicSub(&results[1], x[i]);
    atomicMin(&results[2], x[i]);
    atomicMax(&results[3], x[i]);
    atomicAnd(&results[4], x[i]);
    atomicOr(&results[5], x[i]);
    atomicXor(&results[6], x[i]);
    atomicInc((unsigned *)&results[7], 9u);
    atomicCAS(&results[8], i, -1);
    atomicAdd(sum, (float)x[i]);
    atomicAdd(sum64, (double)x[i]);
    atomicAdd(tickets, 1ull << 33);
}
