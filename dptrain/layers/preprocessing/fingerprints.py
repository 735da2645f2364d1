"""64-bit fingerprints of texts, like those of TensorFlow's hash buckets.

Sources: G. Pike, FarmHash (2014), the fingerprint of 64 bits; J.-P. Aumasson and D. Bernstein, "SipHash: a fast
short-input PRF", Indocrypt 2012.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MASK = 2**64 - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_CROSS = 0xC6A4A7935BD1E995


def _rotate(x: int, by: int) -> int:
    """Rotate 64 bits to the right."""
    return (x >> by | x << (64 - by)) & _MASK


def _shift_mix(x: int) -> int:
    return x ^ x >> 47


def _fetch_64(text: bytes, at: int) -> int:
    return int.from_bytes(text[at : at + 8], "little")


def _hash_len_16(u: int, v: int, factor: int) -> int:
    a = _shift_mix((u ^ v) * factor & _MASK)
    return _shift_mix((v ^ a) * factor & _MASK) * factor & _MASK


def farm(text: bytes) -> int:
    """Return FarmHash's fingerprint."""
    n = len(text)
    factor = _K2 + 2 * n
    if n > 64:
        return _farm_long(text)
    if n >= 17:
        a, b = _fetch_64(text, 0) * (_K1 if n <= 32 else _K2), _fetch_64(text, 8)
        c, d = _fetch_64(text, n - 8) * factor, _fetch_64(text, n - 16) * _K2
        y = _rotate(a + b & _MASK, 43) + _rotate(c & _MASK, 30) + d & _MASK
        z = _hash_len_16(y, a + _rotate(b + _K2 & _MASK, 18) + c & _MASK, factor)
        if n <= 32:
            return z
        e, f = _fetch_64(text, 16) * factor, _fetch_64(text, 24)
        g, h = (y + _fetch_64(text, n - 32)) * factor, (z + _fetch_64(text, n - 24)) * factor
        first = _rotate(e + f & _MASK, 43) + _rotate(g & _MASK, 30) + h
        return _hash_len_16(first & _MASK, e + _rotate(f + a & _MASK, 18) + g & _MASK, factor)
    if n >= 8:
        a, b = _fetch_64(text, 0) + _K2 & _MASK, _fetch_64(text, n - 8)
        return _hash_len_16(_rotate(b, 37) * factor + a & _MASK, (_rotate(a, 25) + b) * factor & _MASK, factor)
    if n >= 4:
        first, last = (int.from_bytes(word, "little") for word in (text[:4], text[-4:]))
        return _hash_len_16(n + (first << 3), last, factor)
    if n:
        y, z = text[0] + (text[n // 2] << 8), n + (text[-1] << 2)
        return _shift_mix((y * _K2 ^ z * _K0) & _MASK) * _K2 & _MASK
    return _K2


def _farm_long(text: bytes) -> int:
    n = len(text)
    x, y = 81, 81 * _K1 + 113 & _MASK
    z = _shift_mix(y * _K2 + 113 & _MASK) * _K2 & _MASK
    v, w = (0, 0), (0, 0)
    x = x * _K2 + _fetch_64(text, 0) & _MASK
    end = (n - 1) // 64 * 64
    factor, addend = _K1, 1
    for number, at in enumerate((*range(0, end, 64), n - 64)):
        if number == end // 64:  # the last 64 bytes, some of which may have been read
            factor, addend = _K1 + ((z & 0xFF) << 1), 9
            w = (w[0] + ((n - 1) & 63) & _MASK, w[1])
            v = (v[0] + w[0] & _MASK, v[1])
            w = (w[0] + v[0] & _MASK, w[1])
        x = _rotate(x + y + v[0] + _fetch_64(text, at + 8) & _MASK, 37) * factor & _MASK
        y = _rotate(y + v[1] + _fetch_64(text, at + 48) & _MASK, 42) * factor & _MASK
        x ^= w[1] * addend & _MASK
        y = y + v[0] * addend + _fetch_64(text, at + 40) & _MASK
        z = _rotate(z + w[0] & _MASK, 33) * factor & _MASK
        v = _weak_hash_len_32(text, at, v[1] * factor, x + w[0])
        w = _weak_hash_len_32(text, at + 32, z + w[1], y + _fetch_64(text, at + 16))
        z, x = x, z
    first = _hash_len_16(v[0], w[0], factor) + _shift_mix(y) * _K0 + z
    return _hash_len_16(first & _MASK, _hash_len_16(v[1], w[1], factor) + x & _MASK, factor)


def _weak_hash_len_32(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_fetch_64(text, at + 8 * n) for n in range(4))
    a = a + w & _MASK
    b = _rotate(b + a + z & _MASK, 21)
    c, a = a, a + x + y & _MASK
    return a + z & _MASK, b + _rotate(a, 44) + c & _MASK


def sip(text: bytes, key: Sequence[int]) -> int:
    """Return SipHash-2-4 with a key of two numbers."""
    k0, k1 = (half & _MASK for half in key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rounds(number: int) -> None:
        for _ in range(number):
            v[0] = v[0] + v[1] & _MASK
            v[2] = v[2] + v[3] & _MASK
            v[1], v[3] = _rotate(v[1], 51) ^ v[0], _rotate(v[3], 48) ^ v[2]
            v[0] = _rotate(v[0], 32)
            v[2] = v[2] + v[1] & _MASK
            v[0] = v[0] + v[3] & _MASK
            v[1], v[3] = _rotate(v[1], 47) ^ v[2], _rotate(v[3], 43) ^ v[0]
            v[2] = _rotate(v[2], 32)

    padded = text + bytes(-(len(text) + 1) % 8) + bytes([len(text) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def cross_fingerprints(fingerprints: Sequence[int]) -> int:
    """Combine several fingerprints into one."""
    crossing = 0xDECAFCAFFE
    for fingerprint in fingerprints:
        crossing = (crossing ^ _CROSS ^ _shift_mix(fingerprint * _CROSS & _MASK) * _CROSS) * _CROSS & _MASK
        crossing = _shift_mix(_shift_mix(crossing) * _CROSS & _MASK)
    return crossing


def fingerprint_each(values: Array, function: Callable[[bytes], int]) -> Array:
    """Return a fingerprint, uint64, of each string, or integer as a string; equal values are computed once."""
    different, places = np.unique(values, return_inverse=True)
    fingerprints = [
        function(value if isinstance(value, bytes) else str(value).encode()) for value in different.tolist()
    ]
    return np.array(fingerprints, np.uint64)[places].reshape(values.shape)
