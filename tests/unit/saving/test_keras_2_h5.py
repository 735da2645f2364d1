"""Weights in the layout of Keras 2; files that Keras writes are read in tests/against_keras/test_applications.py."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError, DataError

h5py = pytest.importorskip("h5py")

KERNEL, BIAS = np.arange(6.0).reshape(3, 2), np.array([7.0, 8.0])
MOMENTS = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]), np.array([7.0, 8.0])]
LAYERS = {
    "flat": {},
    "first": {"first/kernel:0": KERNEL, "first/bias:0": BIAS},
    "norm": dict(zip(("gamma", "beta", "moving_mean", "moving_variance"), MOMENTS, strict=True)),
}


def model():
    layers = [dp.layers.Input((3,)), dp.layers.Dense(2, name="other"), dp.layers.BatchNormalization()]
    return dp.Sequential(layers)


def written(path, layers=LAYERS, *, group=None, chunks=False):
    with h5py.File(path, "w") as file:
        root = file.create_group(group) if group else file
        names = [name.encode() for name in layers]
        for number, part in enumerate([names[:1], names[1:]] if chunks else [names]):
            root.attrs[f"layer_names{number}" if chunks else "layer_names"] = part
        for name, arrays in layers.items():
            place = root.create_group(name)
            place.attrs["weight_names"] = [name.encode() for name in arrays]
            for key, array in arrays.items():
                place[key] = array
    return path


@pytest.mark.parametrize("options", [{}, {"chunks": True}, {"group": "model_weights"}])
def test_layers_go_by_their_order(tmp_path, options):
    net = model()
    net.load_weights(written(tmp_path / "w.h5", **options))
    for weight, expected in zip(net.get_weights(), [KERNEL, BIAS, *MOMENTS], strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_trained_weights_come_first(tmp_path):
    """What is frozen in the model at hand does not matter; what was frozen in the file's lay behind the rest."""
    net = model()
    net.trainable = False
    net.load_weights(written(tmp_path / "w.hdf5"))
    np.testing.assert_array_equal(net.get_weights()[0], KERNEL)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "no attribute 'layer_names'"),
        ({"first": LAYERS["first"]}, "1 layers with weights, the model 'sequential' has 2"),
        ({**LAYERS, "norm": {"gamma": MOMENTS[0]}}, "batch_normalization/beta: not in the file"),
        ({**LAYERS, "first": {"kernel": KERNEL.T, "bias": BIAS}}, r"other/kernel: model \(3, 2\), file \(2, 3\)"),
        ({**LAYERS, "first": {"kernel": KERNEL, "bias": BIAS, "more": BIAS}}, "first/more: not in the model"),
        ({**LAYERS, "first": {"kernel": KERNEL.astype("S3"), "bias": BIAS}}, "dtype"),
    ],
)
def test_other_weights(tmp_path, layers, message):
    with pytest.raises(DataError, match=message) as caught:
        model().load_weights(written(tmp_path / "w.h5", layers))
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_can_be_left_out(tmp_path):
    net = model()
    path = written(tmp_path / "w.h5", {**LAYERS, "first": {"kernel": KERNEL.T, "bias": BIAS}})
    with pytest.warns(UserWarning, match="skipped what does not fit"):
        net.load_weights(path, skip_mismatch=True)
    np.testing.assert_array_equal(net.get_weights()[2], MOMENTS[0])


@pytest.mark.parametrize("where", ["/etc/passwd", "other.h5"])
def test_nothing_outside_of_the_file_is_read(tmp_path, where):
    path = written(tmp_path / "w.h5")
    with h5py.File(path, "a") as file:
        del file["first"]["first"]["kernel:0"]
        if where == "other.h5":
            file["first"]["first"]["kernel:0"] = h5py.ExternalLink(where, "/x")
        else:
            file["first"]["first"].create_dataset("kernel:0", (3, 2), "f8", external=where)
    with pytest.raises(DataError, match=r"which is not (read|followed)"):
        model().load_weights(path)


def test_names_that_are_missing_or_no_text(tmp_path):
    path = written(tmp_path / "w.h5")
    with h5py.File(path, "a") as file:
        file.attrs["layer_names"] = [b"\xff\xfe", b"x"]
    with pytest.raises(DataError, match="damaged"):
        model().load_weights(path)
    with h5py.File(path, "a") as file:
        file.attrs["layer_names"] = [b"first", b"nobody"]
    with pytest.raises(DataError, match="nobody"):
        model().load_weights(path)
    (tmp_path / "w.h5").write_bytes(b"<html>")
    with pytest.raises(DataError, match="HTML"):
        model().load_weights(path)
    with pytest.raises(ConfigError, match="must end in"):
        model().load_weights(tmp_path / "w.txt")
