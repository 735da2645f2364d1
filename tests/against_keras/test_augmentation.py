"""What layers do to pictures at random: the same with what Keras has drawn; and categories that layers adapt to."""

import json

import numpy as np
import pytest

from dptrain import layers
from tests.unit.layers.cases import ALL_CASES, CASES

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors
RANDOM = [(name, number) for name, number in ALL_CASES if name.startswith("Random")]


def arrays(keras, drawn):
    """Return a transformation of Keras' as arrays."""
    if isinstance(drawn, dict):
        return {key: one if isinstance(one, tuple) else arrays(keras, one) for key, one in drawn.items()}
    if isinstance(drawn, tuple):
        return tuple(one if isinstance(one, int) else arrays(keras, one) for one in drawn)
    return keras.ops.convert_to_numpy(drawn) if keras.ops.is_tensor(drawn) else drawn


@pytest.mark.parametrize(("name", "number"), RANDOM)
@pytest.mark.parametrize("single", [False, True])
def test_pictures_are_transformed_as_by_keras(keras, name, number, single):
    case = CASES[name][number]
    ours, (images,) = case.make(), case.inputs()
    ours.set_dtype("float64")
    theirs = keras.saving.deserialize_keras_object(json.loads(json.dumps(layers.serialize(ours))))
    images = images[0] if single else images
    given = keras.ops.convert_to_tensor(images)
    drawn = theirs.get_random_transformation(given, training=True)
    own = arrays(keras, drawn)
    mine = ours.transform_images(images, own).numpy()
    if single and name not in ("RandomRotation", "RandomCrop"):
        expected = theirs.transform_single_image(given, drawn)
    else:
        expected = theirs.transform_images(given, drawn)
    np.testing.assert_allclose(mine, keras.ops.convert_to_numpy(expected), rtol=1e-5, atol=1e-5)


def test_bins(keras):
    x = np.random.default_rng(4).normal(size=(400, 3)).astype(np.float32)
    for data in (x, [x[:100], x[100:350], x[350:]]):
        for bins in (3, 8):
            ours, theirs = layers.Discretization(num_bins=bins), keras.layers.Discretization(num_bins=bins)
            ours.adapt(data)
            for batch in data if isinstance(data, list) else [data]:  # `adapt` needs TensorFlow
                theirs.update_state(batch)
            theirs.finalize_state()
            np.testing.assert_allclose(ours.bin_boundaries, theirs.bin_boundaries, rtol=1e-6)
            np.testing.assert_array_equal(ours(x[:20]), keras.ops.convert_to_numpy(theirs(x[:20])))
    again = layers.deserialize(json.loads(json.dumps(keras.saving.serialize_keras_object(theirs))))
    assert again.bin_boundaries == pytest.approx(theirs.bin_boundaries)
    assert again.num_bins == 8


def test_weights_of_categories(keras):
    x, weights = np.array([[0, 2, 2], [1, 1, 3]]), np.array([[0.5, 1, 2], [1, 1, 0.25]])
    ours, theirs = layers.CategoryEncoding(4, "count"), keras.layers.CategoryEncoding(4, "count")
    found = theirs(x, count_weights=weights)
    np.testing.assert_allclose(ours(x, count_weights=weights), keras.ops.convert_to_numpy(found))


@pytest.mark.parametrize("size", [(3, 8), (7, 7)])
def test_whole_pixels_stay_whole(keras, size):
    x = np.random.default_rng(4).integers(0, 256, (2, 5, 6, 3)).astype(np.uint8)
    ours = layers.Resizing(*size)(x)
    assert ours.dtype == np.uint8
    theirs = keras.ops.convert_to_numpy(keras.layers.Resizing(*size)(x))
    assert np.abs(ours.numpy().astype(int) - theirs.astype(int)).max() <= 1
