"""Pictures one by one; values beside Keras' in tests/against_keras/test_picture_files.py."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

import dptrain as dp
from dptrain.errors import ConfigError, DataError, OutputError

X = np.arange(60, dtype=np.float32).reshape(4, 5, 3)


def test_there_and_back(tmp_path):
    dp.utils.save_img(tmp_path / "a.png", X, scale=False)
    np.testing.assert_array_equal(dp.utils.img_to_array(dp.utils.load_img(tmp_path / "a.png")), X)
    content = io.BytesIO()
    dp.utils.save_img(content, X, file_format="bmp", scale=False)
    content.seek(0)
    np.testing.assert_array_equal(dp.utils.img_to_array(dp.utils.load_img(content)), X)
    np.testing.assert_array_equal(dp.utils.img_to_array(X[..., 0]), X[..., :1])


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"before")
    with pytest.raises(ConfigError, match="as 'gifs'"):
        dp.utils.save_img(path, X, file_format="gifs")
    assert path.read_bytes() == b"before"
    with pytest.warns(UserWarning, match="does not support RGBA"):
        dp.utils.save_img(path, np.zeros((2, 2, 4)))
    assert dp.utils.load_img(path).size == (2, 2)
    with pytest.raises(OutputError):
        dp.utils.save_img(tmp_path / "none" / "a.png", X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dp.utils.load_img("x.png", color_mode="bgr"), "color_mode must be"),
        (lambda: dp.utils.load_img("x.png", interpolation="cubic"), "unknown interpolation 'cubic'; did you mean"),
        (lambda: dp.utils.img_to_array(np.zeros(3)), "Unsupported image shape"),
        (lambda: dp.utils.img_to_array(X, "last"), "`data_format` argument"),
        (lambda: dp.utils.array_to_img(np.zeros((2, 2))), "rank 3"),
        (lambda: dp.utils.array_to_img(np.zeros((2, 2, 2))), "Unsupported channel number: 2"),
    ],
)
def test_arguments_that_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_files_that_are_no_pictures(tmp_path):
    with pytest.raises(DataError, match=r"none\.png: not found"):
        dp.utils.load_img(tmp_path / "none.png")
    with pytest.raises(DataError, match="a picture: not a picture"):
        dp.utils.load_img(io.BytesIO(b"text"))


def test_pillow_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pictures need Pillow: pip install 'pillow"):
        dp.utils.array_to_img(X)


def test_keras_2_has_them_in_another_place():
    image = dp.preprocessing.image
    for name in ("load_img", "img_to_array", "array_to_img", "save_img"):
        assert getattr(image, name) is getattr(dp.utils, name)
    assert dp.preprocessing.image_dataset_from_directory is dp.utils.image_dataset_from_directory
    assert dp.preprocessing.sequence.pad_sequences is dp.utils.pad_sequences
    assert dp.preprocessing.timeseries_dataset_from_array is dp.utils.timeseries_dataset_from_array


DEEP = np.array([[0, 4369, 65535], [257, 255, 32896]], np.uint16)


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_of_16_bits_the_upper_eight_count(tmp_path, ending, color_mode):
    (tmp_path / "class").mkdir()
    for dtype in ("<u2", ">u2"):
        Image.fromarray(DEEP.astype(dtype)).save(tmp_path / "class" / f"{dtype[1:]}.{ending}")
    where = tmp_path / "class" / f"u2.{ending}"
    upper = (DEEP >> 8).astype(np.float32)
    if color_mode != "grayscale":  # which Keras leaves as it is
        loaded = dp.utils.img_to_array(dp.utils.load_img(where, color_mode=color_mode))
        np.testing.assert_array_equal(loaded[..., :3], np.repeat(upper[..., None], 3, 2))
    else:
        np.testing.assert_array_equal(
            dp.utils.img_to_array(dp.utils.load_img(where, color_mode=color_mode))[..., 0], DEEP
        )
    if ending == "png":
        dataset = dp.utils.image_dataset_from_directory(
            tmp_path, image_size=(2, 3), color_mode=color_mode, verbose=False, shuffle=False
        )
        np.testing.assert_array_equal(dataset[0][0][0, ..., 0], upper)


def test_more_bits_are_refused_where_they_would_be_cut_off(tmp_path):
    Image.fromarray(np.array([[0, 1 << 20]], np.int32)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif: pixels of mode I from 0 to 1048576; expected 8 or 16 bits"):
        dp.utils.load_img(tmp_path / "deep.tif")
    Image.fromarray(np.array([[0, 200]], np.int32)).save(tmp_path / "flat.tif")
    assert dp.utils.img_to_array(dp.utils.load_img(tmp_path / "flat.tif"))[0, 1, 2] == 200
