// Random numbers: the bits of NumPy's Philox4x64-10.
//
// A row begins a block of eight 32-bit numbers: block k of a row is Philox with key (seed, purpose) and counter
// (row * blocks + k + 1, count, number, 0); NumPy counts up before it draws, whence the 1.
// Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "common.cuh"

typedef unsigned long long Word;

// What a thread has drawn last: a block, whose eight numbers it takes one by one where it goes along a row.
struct Drawn {
    Word c0, c1, c2, c3, of_row;
    Index block = -1;

    // Number `feature` of the `features` that row `row` of all has; seed, purpose, count and number stay the same.
    __device__ __forceinline__ unsigned int bits(Word seed, Word purpose, Word count, Word number, Word row, Index feature,
                                                 Index features) {
        if (feature / 8 != block || row != of_row) draw(seed, purpose, count, number, row, feature / 8, features);
        const int part = feature % 8;
        const Word word = part < 2 ? c0 : part < 4 ? c1 : part < 6 ? c2 : c3;
        return (unsigned int)(word >> (part % 2 * 32));
    }

    __device__ __forceinline__ void draw(Word seed, Word purpose, Word count, Word number, Word row, Index of, Index features) {
        const Word M0 = 0xD2E7470EE14C6C93ull, M1 = 0xCA5A826395121157ull;
        const Word W0 = 0x9E3779B97F4A7C15ull, W1 = 0xBB67AE8584CAA73Bull;
        // The counter is one number of 256 bits: its lowest word carries into the next.
        c0 = row * ((features + 7) / 8) + of + 1, c1 = count + (c0 == 0), c2 = number + (c0 == 0 && c1 == 0), c3 = 0;
        Word k0 = seed, k1 = purpose;
        for (int round = 0; round < 10; ++round) {
            const Word high0 = __umul64hi(M0, c0), low0 = M0 * c0;
            const Word high1 = __umul64hi(M1, c2), low1 = M1 * c2;
            c0 = high1 ^ c1 ^ k0;
            c1 = low1;
            c2 = high0 ^ c3 ^ k1;
            c3 = low0;
            k0 += W0;
            k1 += W1;
        }
        of_row = row;
        block = of;
    }
};
