"""Fingerprints of texts are those of FarmHash and SipHash: numbers of their own programs."""

import numpy as np
import pytest

from dptrain.layers.preprocessing.fingerprints import cross_fingerprints, farm, fingerprint_each, sip


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *((5, 17544397618905156130), (20, 906141753060109542), (40, 16779646747433830874)),
        *((64, 1705570018418725142), (65, 1350617117134700943), (100, 12119810371071762544)),
        *((128, 17842825544488259798), (129, 15740240236176653322), (200, 3793065838716207133)),
    ],
)
def test_farm(length, expected):
    """As FarmHash's `Fingerprint64` returns them, of lengths on both sides of its thresholds."""
    assert farm((b"ab" * length)[:length]) == expected


def test_farm_of_short_texts():
    """As TensorFlow's `to_hash_bucket_fast` finds buckets, in Keras' documentation."""
    assert [farm(string) % 3 for string in (b"A", b"B", b"C", b"D", b"E")] == [1, 0, 1, 1, 2]
    assert [farm(string) % 2 for string in (b"omar", b"stringer", b"marlo", b"wire", b"skywalker")] == [0, 0, 1, 0, 0]
    assert farm(b"") == 0x9AE16A3B2F90404F


def test_sip():
    """The test vector of the paper's appendix A."""
    key = 0x0706050403020100, 0x0F0E0D0C0B0A0908
    assert sip(bytes(range(15)), key) == 0xA129CA6149BE45E5


def test_crosses():
    """As TensorFlow's `cross_hashed`, in Keras' documentation."""
    rows = zip((b"A", b"B", b"A", b"B", b"A"), (101, 101, 101, 102, 102), strict=True)
    assert [cross_fingerprints((farm(text), number)) % 5 for text, number in rows] == [1, 4, 1, 1, 3]


def test_numbers_are_taken_as_texts_and_equal_ones_once():
    calls = []
    fingerprints = fingerprint_each(np.array([[7, -3], [7, 7]]), lambda text: calls.append(text) or len(text))
    assert fingerprints.tolist() == [[1, 2], [1, 1]]
    assert sorted(calls) == [b"-3", b"7"]
