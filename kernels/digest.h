// The digest of bytes, for C++ and CUDA alike: the sum of their 64-bit words, each folded and times an odd number that
// depends on its place, modulo 2^64. Another value in one place always changes it, as both have an inverse; others, and
// values that change places, do but for one case in 2^32 or fewer: folded, the highest bits reach the middle of the
// product. Sums of integers have the same bits in whatever order they are made.
//
// The last word is filled up with zeros. Beside the digest it says whether a number among them is NaN or infinite: all bits
// of its type's mask are set then (`not_finite` of the table in dptrain/runtime/types.py); 0 if nothing is.
//
// Source of the numbers: G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", 2014 (SplitMix64).
#ifndef DPTRAIN_DIGEST_H
#define DPTRAIN_DIGEST_H

#ifdef __CUDACC__
#include "scalar.h"  // which stands before this text for a CPU
#endif

typedef unsigned long long dp_word;

#define DP_BLOCK 512  // words whose numbers are those of their places in the block, times one of the block

DP_INLINE dp_word dp_odd(dp_word n) {
    n = (n + 1) * 0x9E3779B97F4A7C15ull;
    n = (n ^ (n >> 30)) * 0xBF58476D1CE4E5B9ull;
    n = (n ^ (n >> 27)) * 0x94D049BB133111EBull;
    return (n ^ (n >> 31)) | 1;
}
DP_INLINE dp_word dp_odd_of_block(dp_word block) { return dp_odd(block + (1ull << 32)); }

DP_INLINE dp_word dp_folded(dp_word word) { return word ^ (word >> 32); }

// Bits of the numbers with this mask, which reaches to the bit below the sign.
DP_INLINE int dp_bits_of(dp_word mask) { return mask >> 32 ? 64 : mask >> 16 ? 32 : mask >> 8 ? 16 : 8; }

DP_INLINE bool dp_not_finite(dp_word word, dp_word mask) {
    if (!mask) return false;
    const int bits = dp_bits_of(mask);
    bool found = false;
    for (int at = 0; at < 64; at += bits) found |= (word >> at & mask) == mask;
    return found;
}

#ifdef __CUDACC__

// Adds the digest of array blockIdx.y to out[2 * blockIdx.y], and to the next how many threads have seen what is not
// finite. An entry of `table` is an array's address, its bytes and its type's mask. Grid: any number of blocks, arrays; 256 threads.
extern "C" __global__ void digest(const long long *table, dp_word *out) {
    const long long *entry = table + 3 * blockIdx.y;
    const unsigned char *bytes = (const unsigned char *)entry[0];
    const long long length = entry[1], words = (length + 7) / 8, blocks = (words + DP_BLOCK - 1) / DP_BLOCK;
    const dp_word mask = (dp_word)entry[2];
    dp_word total = 0, wrong = 0;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        dp_word sum = 0;
        for (int place = threadIdx.x; place < DP_BLOCK; place += blockDim.x) {
            const long long n = block * DP_BLOCK + place;
            if (n >= words) break;
            dp_word word = 0;
            if (n * 8 + 8 <= length) word = ((const dp_word *)bytes)[n];
            else for (int k = 0; n * 8 + k < length; ++k) word |= (dp_word)bytes[n * 8 + k] << (8 * k);
            sum += dp_folded(word) * dp_odd(place);
            wrong |= dp_not_finite(word, mask);
        }
        total += sum * dp_odd_of_block(block);
    }
    if (total) atomicAdd(out + 2 * blockIdx.y, total);
    if (wrong) atomicAdd(out + 2 * blockIdx.y + 1, wrong);
}

#else

template <class T> static bool dp_has_not_finite(const char *from, int64_t count, T mask) {
    T most = 0, one;
    for (int64_t n = 0; n < count; ++n) {
        memcpy(&one, from + n * sizeof(T), sizeof(T));
        one &= mask;
        most = one > most ? one : most;
    }
    return most == mask;
}

// Writes the digest of each of `count` arrays, and 1 or 0 for whether it holds what is not finite; as the kernel.
extern "C" void digest(const char *const *arrays, const int64_t *lengths, const int64_t *masks, int64_t count,
                       dp_word *out) {
    dp_word odd[DP_BLOCK];
    for (int place = 0; place < DP_BLOCK; ++place) odd[place] = dp_odd(place);
    for (int64_t a = 0; a < count; ++a) {
        const int64_t words = lengths[a] / 8, rest = lengths[a] % 8;
        dp_word total = 0, wrong = 0;
        for (int64_t first = 0; first < words || (first == words && rest); first += DP_BLOCK) {
            const char *from = arrays[a] + 8 * first;
            const int64_t whole = words - first < DP_BLOCK ? words - first : DP_BLOCK;
            dp_word sum = 0, word;
            for (int64_t place = 0; place < whole; ++place) {
                memcpy(&word, from + 8 * place, 8);
                sum += dp_folded(word) * odd[place];
            }
            const dp_word mask = (dp_word)masks[a];
            const int bits = mask ? dp_bits_of(mask) : 0;
            if (bits == 8) wrong |= dp_has_not_finite<uint8_t>(from, 8 * whole, mask);
            if (bits == 16) wrong |= dp_has_not_finite<uint16_t>(from, 4 * whole, mask);
            if (bits == 32) wrong |= dp_has_not_finite<uint32_t>(from, 2 * whole, mask);
            if (bits == 64) wrong |= dp_has_not_finite<uint64_t>(from, whole, mask);
            if (whole < DP_BLOCK && rest) {
                word = 0;
                memcpy(&word, from + 8 * whole, rest);
                sum += dp_folded(word) * odd[whole];
                wrong |= dp_not_finite(word, mask);
            }
            total += sum * dp_odd_of_block(first / DP_BLOCK);
        }
        out[2 * a] = total;
        out[2 * a + 1] = wrong;
    }
}

#endif
#endif
