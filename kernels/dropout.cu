// Dropout's mask: the same bits as the NumPy backend's.
//
// mask_BF[b, f] = kept where 32-bit number f of row first_row + b is at least `threshold`, else 0. A row begins a new
// block of eight 32-bit numbers: block k of a row is Philox4x64-10 with key (seed, purpose) and counter
// ((first_row + b) * blocks + k + 1, step, layer, 0); NumPy counts up before it draws, whence the 1.
//
// A thread draws one block of eight: grid-stride over B * ceil(F / 8), any block. Overwrites. Deterministic.
// Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#include "common.cuh"

typedef unsigned long long Word;

struct Block {
    Word word[4];
};

__device__ inline Block philox4x64_10(Word c0, Word c1, Word c2, Word c3, Word k0, Word k1) {
    const Word M0 = 0xD2E7470EE14C6C93ull, M1 = 0xCA5A826395121157ull;
    const Word W0 = 0x9E3779B97F4A7C15ull, W1 = 0xBB67AE8584CAA73Bull;
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
    Block result;
    result.word[0] = c0;
    result.word[1] = c1;
    result.word[2] = c2;
    result.word[3] = c3;
    return result;
}

extern "C" __global__ void dropout_mask(float *mask_BF, long long B, int F, unsigned int threshold, float kept,
                                        Word seed, Word purpose, Word step, Word layer, Word first_row) {
    const long long blocks = (F + 7) / 8;
    for (long long i = grid_thread(); i < B * blocks; i += grid_threads()) {
        const long long b = i / blocks, k = i % blocks;
        const Word place = (first_row + b) * blocks + k;
        // The counter is one number of 256 bits: its lowest word carries into the next.
        const Word c0 = place + 1, c1 = step + (c0 == 0), c2 = layer + (c0 == 0 && c1 == 0);
        const Block block = philox4x64_10(c0, c1, c2, 0, seed, purpose);
        for (int part = 0; part < 8; ++part) {
            const long long f = k * 8 + part;
            const unsigned int draw = (unsigned int)(block.word[part / 2] >> (part % 2 * 32));
            if (f < F) mask_BF[b * F + f] = draw >= threshold ? kept : 0.0f;
        }
    }
}
