// What the matrix products (product.cuh, product_tf32.cuh, product_half.cuh, product_wgmma.cuh) share: their operands, the way
// of a tile into shared memory, with edges of any size, and slices of long sums.
#pragma once

#include "common.cuh"

// Where the elements of a matrix are in memory: rows `pitch` apart, columns side by side.
//
// Matrices that are gathered (convolution.cuh) have the same functions, and their own idea of a row and a column. Elements
// that a matrix does not have are 0. Columns lie side by side in a matrix that is SIDE_BY_SIDE; where another is read by
// vectors of 16 bytes, as many do as these hold, from a multiple of that number on.
struct Dense {
    static constexpr bool SIDE_BY_SIDE = true;
    __device__ __forceinline__ long long row(int row, long long pitch) const { return row * pitch; }
    __device__ __forceinline__ int column(int column) const { return column; }
    __device__ __forceinline__ bool has(long long, int) const { return true; }
    __device__ __forceinline__ long long at(long long row, int column) const { return row + column; }
};

// One matrix's part of a tile on its way from global to shared memory.
//
// The part is ROWS x COLUMNS in global memory, where columns are contiguous. TRANSPOSED stores it as [column][row]. PAD
// floats lie between the rows in shared memory, which spreads them over the banks.
template <int ROWS, int COLUMNS, int THREADS, bool TRANSPOSED, int PAD> struct Part {
    static constexpr int QUADS = ROWS * COLUMNS / 4 / THREADS;
    static constexpr int PITCH = (TRANSPOSED ? ROWS : COLUMNS) + PAD, SIZE = (TRANSPOSED ? COLUMNS : ROWS) * PITCH;
    static_assert(QUADS * 4 * THREADS == ROWS * COLUMNS, "every thread carries the same number of quads");
    float4 quads[QUADS];
    Index places[QUADS];

    // Read from `source`, whose elements are where `matrix` says; outside (rows, columns) there are zeros.
    template <class Matrix>
    __device__ inline void load(const float *source, long long pitch, int row0, int rows, int column0, int columns,
                                bool vector, const Matrix &matrix) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int i = threadIdx.x + q * THREADS;
            const int row = row0 + i / (COLUMNS / 4), column = column0 + i % (COLUMNS / 4) * 4;
            float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < rows) {
                const auto of_row = matrix.row(row, pitch);
                if (vector && column + 4 <= columns) {
                    const auto of_column = matrix.column(column);
                    if (matrix.has(of_row, of_column))
                        quad = *reinterpret_cast<const float4 *>(source + matrix.at(of_row, of_column));
                } else if constexpr (Matrix::SIDE_BY_SIDE) {  // as below, in fewer registers
                    const float *place = source + matrix.at(of_row, column);
                    if (column < columns) quad.x = place[0];
                    if (column + 1 < columns) quad.y = place[1];
                    if (column + 2 < columns) quad.z = place[2];
                    if (column + 3 < columns) quad.w = place[3];
                } else {
                    auto read = [&](int j, float &element) {  // returning it, nvcc 13.0 would compile for minutes
                        const auto of_column = matrix.column(column + j);
                        if (column + j < columns && matrix.has(of_row, of_column))
                            element = source[matrix.at(of_row, of_column)];
                    };
                    read(0, quad.x), read(1, quad.y), read(2, quad.z), read(3, quad.w);
                }
            }
            quads[q] = quad;
        }
    }

    // Finds the quads in a dense matrix, whose lines (rows of a, columns of b) begin at `line0`, for a stage that begins with
    // term 0. Instead of a line that there is not, another one is read, of which nothing comes.
    __device__ __forceinline__ void find(Index pitch, int line0, int lines) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int i = threadIdx.x + q * THREADS, row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            if (TRANSPOSED) places[q] = min(line0 + row, lines - 1) * pitch + column;
            else places[q] = row * pitch + min(line0 + column, lines - 4);
        }
    }

    // Read them from term `k` on, where the matrix has all of the stage's terms.
    __device__ __forceinline__ void load_found(const float *source, Index pitch, int k) {
        const float *const of_stage = source + (TRANSPOSED ? (Index)k : k * pitch);
#pragma unroll
        for (int q = 0; q < QUADS; ++q) quads[q] = *reinterpret_cast<const float4 *>(of_stage + places[q]);
    }

    __device__ inline void store(float *tile) const {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int i = threadIdx.x + q * THREADS;
            const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            if (TRANSPOSED) {
                tile[(column + 0) * PITCH + row] = quads[q].x;
                tile[(column + 1) * PITCH + row] = quads[q].y;
                tile[(column + 2) * PITCH + row] = quads[q].z;
                tile[(column + 3) * PITCH + row] = quads[q].w;
            } else {
                *reinterpret_cast<float4 *>(&tile[row * PITCH + column]) = quads[q];
            }
        }
    }
};

// Whether four floats can be read at once from there.
static __device__ __forceinline__ bool aligned(const void *pointer) { return (size_t)pointer % 16 == 0; }

// How many slices of a sum one block joins: a node of a tree, which is as deep as slices are many.
#define SLICE_FAN 16

// Counters of arrived blocks that a tile of so many slices takes: one for each node, at least one.
__host__ __device__ __forceinline__ int slice_counters(int slices) {
    int counters = 0;
    do {
        slices = (slices + SLICE_FAN - 1) / SLICE_FAN;
        counters += slices;
    } while (slices > 1);
    return counters;
}

// The operands of a product c_MN = a b, and of a batch of them, and who computes which part.
//
// a is (M, K), or (K, M) where the kernel says A_TRANSPOSED; b is (K, N), or (N, K). Block = tile of m + tiles of M * (tile
// of n + tiles of N * (slice of K + slices * matrix of the batch)). With one slice a block hands its results to the
// epilogue. With more, it leaves its sums in `parts`, (tiles, slices, a tile), and the last of SLICE_FAN neighbours to arrive
// adds these up in their order, in the place of the first; the last of SLICE_FAN such blocks goes on, until one has all of
// a tile: a tall-skinny batch has too few tiles to fill a GPU, and a sum over all pixels of all images is long.
template <class Number> struct ProductOf {
    const Number *a, *b;
    int M, N, K;
    long long step_a, step_b;  // from matrix to matrix of the batch; 0 for the same one
    int depth, slices;         // terms of a slice
    bool wide_a, wide_b;       // whether every row begins at a multiple of 16 bytes
    float *parts;
    unsigned int *arrived;     // slice_counters(slices) for each tile

    int tile, slice, m0, n0, k_begin, k_end;
    long long matrix;

    template <int BM, int BN> __device__ __forceinline__ void enter(int block) {
        const int tiles_m = max(1, (M + BM - 1) / BM), tiles_n = (N + BN - 1) / BN;  // no rows: where columns are summed
        const int of_matrix = block % (tiles_m * tiles_n), rest = block / (tiles_m * tiles_n);
        m0 = of_matrix % tiles_m * BM;
        n0 = of_matrix / tiles_m * BN;
        slice = rest % slices;
        matrix = rest / slices;
        tile = of_matrix + (int)matrix * tiles_m * tiles_n;
        k_begin = slice * depth;
        k_end = min(k_begin + depth, K);
        a += matrix * step_a;
        b += matrix * step_b;
    }

    // Joins COUNT sums of each of the threads that have some over the slices; false in blocks that leave the end to
    // another one.
    template <int COUNT, class Each, class Team = WholeBlock>
    __device__ __forceinline__ bool join(Each each, void *shared, Team &&team = Team()) {
        if (slices == 1) return true;
        constexpr int AHEAD = COUNT <= 4 ? 8 : COUNT <= 16 ? 4 : 1;  // slices on their way at once
        const int threads = team.count();
        float *const of_thread = parts + (long long)tile * slices * (COUNT * threads) + team.number();
        unsigned int *const counters = arrived + (long long)tile * slice_counters(slices);
        int before = 0;  // counters of nodes below; a pointer that goes on, nvcc 13.0 would compile for minutes
#pragma unroll
        for (int e = 0; e < COUNT; ++e) of_thread[((long long)slice * COUNT + e) * threads] = each(e);
        for (int node = slice, count = slices, distance = 1;; distance *= SLICE_FAN) {
            const int nodes = (count + SLICE_FAN - 1) / SLICE_FAN;
            node /= SLICE_FAN;
            const int joined = min(SLICE_FAN, count - node * SLICE_FAN);
            if (!is_last_block(counters + before + node, joined, shared, team)) return false;
            float *const first = of_thread + (long long)node * SLICE_FAN * distance * COUNT * threads;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) each(e) = 0.0f;
            // Slices outside and hardly unrolled: COUNT loops over them would take nvcc ten times as long as the product.
            // AHEAD of them with a condition each: the rest of an unrolled loop would wait for one after the other.
#pragma unroll 1
            for (int begin = 0; begin < joined; begin += AHEAD) {
#pragma unroll
                for (int own = 0; own < AHEAD; ++own)
                    if (own == 0 || begin + own < joined)
#pragma unroll
                        for (int e = 0; e < COUNT; ++e)
                            each(e) += first[((long long)(begin + own) * distance * COUNT + e) * threads];
            }
            if (nodes == 1) return true;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) first[(long long)e * threads] = each(e);
            before += nodes;
            count = nodes;
        }
    }
};
using Product = ProductOf<float>;

// Sums over the rows of a result, for each column, where a block has a tile of it: BatchNormalization's, a bias's gradient.
//
// A kernel calls its epilogue with the number of the column among the EACH that the thread has, so that this adds up what
// becomes of them; SLOTS threads have the same columns. Then it hands this on, and thread n knows of column n of the tile:
// first the block's sum (`join`), then, in the last block, that of all tiles of rows (`over_tiles`), in a tree of FAN tiles
// a node. Deterministic: shapes alone decide who adds what, in which order.
template <int BN, int EACH, int SLOTS, class Column, class Team> struct TileColumns {
    static constexpr int FAN = 32, AHEAD = 8;  // parts that a thread has on their way at once
    void *shared;          // a double for each of SLOTS * BN, which nobody reads any more
    int slot;              // of the thread
    int row_tile;          // number of the tile among those of the same columns
    int first, N;          // column of the result that the tile begins with, and how many there are
    const Column &number;  // of a thread's column: which one of the tile
    Team &team;            // the threads that call; at least BN

    __device__ __forceinline__ Index column() const { return first + team.number(); }
    __device__ __forceinline__ bool has_column() const { return team.number() < BN && column() < N; }

    // What a block's threads have.
    template <class Join, class T> __device__ __forceinline__ typename Wide<T>::type join(const T (&own)[EACH]) const {
        typedef typename Wide<T>::type W;
        team.meet();
#pragma unroll
        for (int e = 0; e < EACH; ++e) ((W *)shared)[slot * BN + number(e)] = own[e];
        return over_slots<Join, W>(SLOTS);
    }

    // What `count` tiles of rows have left in `parts`, (tiles, N), from tile `begin` on.
    template <class Join, class W> __device__ __forceinline__ W join(const W *parts, int begin, int count) const {
        const int slots = min(team.count() / BN, SLOTS), own = team.number() / BN, of_tile = team.number() % BN;
        W value = Join::template identity<W>();
        if (own < slots && first + of_tile < N)
#pragma unroll 1
            for (int tile = own; tile < count; tile += AHEAD * slots) {
#pragma unroll
                for (int turn = 0; turn < AHEAD; ++turn)
                    if (turn == 0 || tile + turn * slots < count)
                        value = Join::join(value, parts[(long long)(begin + tile + turn * slots) * N + first + of_tile]);
            }
        team.meet();
        if (own < slots) ((W *)shared)[own * BN + of_tile] = value;
        return over_slots<Join, W>(slots);
    }

    template <class Join, class W> __device__ __forceinline__ W over_slots(int count) const {
        team.meet();
        W value = Join::template identity<W>();
        if (team.number() < BN)
            for (int one = 0; one < count; ++one) value = Join::join(value, ((const W *)shared)[one * BN + team.number()]);
        return value;
    }

    // Whether this block knows the sums of all tiles of rows. `leave(n)` stores the block's sums as part n, `take(begin, count)`
    // replaces them by those of parts. `arrived` has, behind those of each tile's `slices`, one for each node and tile of
    // columns.
    template <class Leave, class Take>
    __device__ __forceinline__ bool over_tiles(int tile, int tiles, int slices, unsigned int *arrived, Leave leave,
                                               Take take) const {
        const int of_columns = (N + BN - 1) / BN;
        int counter = tiles * of_columns * slice_counters(slices) + first / BN;  // a pointer that goes on, nvcc 13.0 would compile for minutes
        for (int before = 0; tiles > 1;) {
            const int node = tile / FAN, nodes = (tiles + FAN - 1) / FAN, count = min(FAN, tiles - node * FAN);
            leave(before + tile);
            if (!is_last_block(arrived + counter + node * of_columns, count, shared, team)) return false;
            take(before + node * FAN, count);
            counter += nodes * of_columns;
            before += tiles;
            tile = node;
            tiles = nodes;
        }
        return true;
    }
};

template <int BN, int EACH, int SLOTS, class Product, class Column, class Team>
__device__ __forceinline__ TileColumns<BN, EACH, SLOTS, Column, Team> tile_columns(void *shared, int slot, const Product &of,
                                                                                   int row_tile, const Column &number,
                                                                                   Team &team) {
    return {shared, slot, row_tile, of.n0, of.N, number, team};
}

// Of products whose columns nothing sums.
struct NoColumns {
    template <class Columns> __device__ __forceinline__ void operator()(const Columns &) const {}
};
