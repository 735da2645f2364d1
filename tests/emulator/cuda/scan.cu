// Inclusive prefix sums: in a block through dynamic shared memory, in a warp by shuffles.
extern "C" __global__ void block_scan(const int *x, int *out, int n) {
    extern __shared__ int buffer[];
    int *from = buffer, *to = buffer + blockDim.x;
    int i = threadIdx.x;
    from[i] = i < n ? x[i] : 0;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        to[i] = from[i] + (i >= step ? from[i - step] : 0);
        __syncthreads();
        int *other = from;
        from = to;
        to = other;
    }
    if (i < n) out[i] = from[i];
}

extern "C" __global__ void warp_scan(const int *x, int *out) {
    int lane = threadIdx.x % 32, value = x[threadIdx.x];
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += other;
    }
    out[threadIdx.x] = value;
}

// The same without shuffles: __syncwarp orders the lanes.
extern "C" __global__ void warp_scan_shared(const int *x, int *out) {
    __shared__ int values[1024];
    int i = threadIdx.x, lane = i % 32;
    values[i] = x[i];
    __syncwarp();
    for (int step = 1; step < 32; step *= 2) {
        int other = lane >= step ? values[i - step] : 0;
        __syncwarp();
        values[i] += other;
        __syncwarp();
    }
    out[i] = values[i];
}
