"""Pictures of another size on the host are those of the op."""

import numpy as np
import pytest

from dptrain.batches.resampling import resized
from dptrain.ops.image.resizing import RESIZE_INTERPOLATIONS, resize


@pytest.mark.parametrize("interpolation", RESIZE_INTERPOLATIONS)
@pytest.mark.parametrize("looks", [{}, {"crops": True}, {"pads": True}])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((7, 12, 3), (5, 5)), ((4, 3, 1), (9, 20)), ((1, 1, 4), (3, 2)), ((6, 6, 3), (6, 6)), ((8, 40, 3), (8, 10))],
)
def test_the_same_pixels(interpolation, looks, shape, size):
    x = (np.random.default_rng(3).random(shape) * 255).astype(np.float32)
    before = x.copy()
    actual = resized(x, size, interpolation, **looks)
    options = {"crop_to_aspect_ratio": looks.get("crops", False), "pad_to_aspect_ratio": looks.get("pads", False)}
    expected = resize(x, size, interpolation, **options).numpy()
    assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(x, before)
