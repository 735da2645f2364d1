"""The built-in data set: reproducible image by image, balanced, and neither trivial nor hopeless."""

import hashlib

import numpy as np
import pytest

from dptrain.data import strokes
from dptrain.errors import DataError


@pytest.fixture(scope="module")
def small():
    return strokes.generate(2000, 500)


def test_shapes_and_dtypes(small):
    x, y, x_test, y_test = small
    assert (x.shape, y.shape, x_test.shape, y_test.shape) == ((2000, 28, 28), (2000,), (500, 28, 28), (500,))
    assert {a.dtype for a in small} == {np.dtype(np.uint8)}
    counts = np.bincount(y, minlength=len(strokes.CLASS_NAMES))
    assert counts.shape == (10,)
    assert counts.min() > 150


def test_a_smaller_set_is_a_prefix(small):
    # Neither a whole number of chunks nor the same number in both splits.
    x, y, x_test, y_test = strokes.generate(130, 97)
    np.testing.assert_array_equal(x, small[0][:130])
    np.testing.assert_array_equal(y, small[1][:130])
    np.testing.assert_array_equal(x_test, small[2][:97])
    np.testing.assert_array_equal(y_test, small[3][:97])
    assert [len(a) for a in strokes.generate(0, 0)] == [0, 0, 0, 0]


def test_chunks_of_another_size_give_the_same_images(small, monkeypatch):
    monkeypatch.setattr(strokes, "_CHUNK", 7)
    x, y, _, _ = strokes.generate(50, 0)
    np.testing.assert_array_equal(x, small[0][:50])
    np.testing.assert_array_equal(y, small[1][:50])


def test_the_same_images_on_every_machine(small):
    """The digest changes with any image: raise `VERSION` with it, or caches keep the old ones."""
    digest = hashlib.sha256(b"".join(a.tobytes() for a in small)).hexdigest()
    assert (strokes.VERSION, digest) == (1, "deef0789f9a66df45ba833adba5f9904a87598647b6b16c288fd0a038dc77e5b")


def test_seeds_and_splits_differ(small):
    other = strokes.generate(500, 0, seed=1)
    assert (other[0] != small[0][:500]).any(axis=(1, 2)).all()
    assert (small[2] != small[0][:500]).any(axis=(1, 2)).all()
    assert len(np.unique(small[0].reshape(2000, -1), axis=0)) == 2000


def test_images_are_ink_on_a_dark_noisy_ground(small):
    x = small[0]
    assert x.max() == 255
    assert (x.max(axis=(1, 2)) > 80).all()
    ink = (x > 100).mean(axis=(1, 2))
    assert 0.05 < ink.mean() < 0.25
    assert (x == 0).mean() > 0.3
    border = np.concatenate([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], axis=1)
    assert border.mean() < 15


def test_neither_trivial_nor_hopeless(small):
    """Nearest neighbour by correlation among 2,000 images: far above chance, far below certain."""
    x, y, x_test, y_test = small

    def unit(a):
        flat = a.reshape(len(a), -1).astype(np.float32)
        flat -= flat.mean(axis=1, keepdims=True)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    accuracy = (y[(unit(x_test) @ unit(x).T).argmax(axis=1)] == y_test).mean()
    assert 0.6 < accuracy < 0.95


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_arguments(arguments):
    with pytest.raises(DataError, match="expected integers >= 0"):
        strokes.generate(*arguments)
