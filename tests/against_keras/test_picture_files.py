"""Pictures from files: what is read, written, resized and split off, beside Keras' own functions."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dptrain as dp

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors

RNG = np.random.default_rng(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of several sizes, colours and formats, below two folders."""
    folder = tmp_path_factory.mktemp("pictures")
    for label in ("a", "b"):
        (folder / label / "more").mkdir(parents=True)
        for number, (mode, ending) in enumerate((("RGB", "png"), ("L", "JPG"), ("RGBA", "png"), ("P", "gif"))):
            height, width = RNG.integers(5, 30, 2)
            bands = len(Image.new(mode, (1, 1)).getbands())
            pixels = RNG.integers(0, 255, (height, width, bands), np.uint8)
            image = Image.fromarray(pixels.squeeze() if bands == 1 else pixels, None if mode != "P" else "L")
            image.convert(mode).save(folder / label / ("more" if number == 2 else ".") / f"{number}.{ending}")
    return folder


@pytest.fixture
def float32(keras):
    keras.config.set_floatx("float32")
    yield
    keras.config.set_floatx("float64")


@pytest.mark.parametrize(
    "options",
    [
        {"color_mode": "rgb"},
        {"color_mode": "grayscale", "interpolation": "nearest"},
        {"color_mode": "rgba", "interpolation": "lanczos3"},
        {"color_mode": "rgb", "crop_to_aspect_ratio": True},
        {"color_mode": "rgb", "pad_to_aspect_ratio": True, "data_format": "channels_first"},
    ],
)
def test_decoded_pictures(keras, float32, folder, options):
    from keras.src.utils.image_dataset_utils import _load_image_grain

    if keras.backend.backend() == "torch" and options.get("interpolation", "bilinear") == "lanczos3":
        pytest.skip("Keras on PyTorch has no lanczos3")
    dataset = dp.utils.image_dataset_from_directory(
        folder, image_size=(9, 12), batch_size=1, shuffle=False, verbose=False, **options
    )
    channels = {"rgb": 3, "grayscale": 1, "rgba": 4}[options["color_mode"]]
    arguments = {"interpolation": "bilinear", "data_format": "channels_last", **options}
    del arguments["color_mode"]
    for path, (x, _) in zip(dataset.file_paths, dataset, strict=True):
        expected = keras.ops.convert_to_numpy(
            _load_image_grain(io.BytesIO(Path(path).read_bytes()), (9, 12), channels, **arguments)
        )
        np.testing.assert_allclose(x[0], expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("labels", ["inferred", None, [4, 3, 2, 1, 4, 3, 2, 1]])
def test_files_labels_and_parts(keras, folder, labels):
    from keras.src.utils import dataset_utils

    for seed in (0, 7):
        files, numbers, names = dataset_utils.index_directory(
            str(folder), labels and labels[:], (".bmp", ".gif", ".jpeg", ".jpg", ".png"), seed=seed, verbose=False
        )
        options = {"labels": labels, "seed": seed, "verbose": False, "validation_split": 0.4, "image_size": 4}
        train, validation = dp.utils.image_dataset_from_directory(folder, subset="both", **options)
        assert [*train.file_paths, *validation.file_paths] == [str(file) for file in files]
        assert len(validation.file_paths) == int(0.4 * len(files))
        assert train.class_names == names
        labels_of_both = None if labels is None else [*train._labels, *validation._labels]
        assert labels_of_both == (None if numbers is None else list(numbers))


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
@pytest.mark.parametrize("size", [{}, {"target_size": (7, 20)}, {"target_size": (7, 20), "keep_aspect_ratio": True}])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "lanczos"])
def test_load_img(keras, folder, color_mode, size, interpolation):
    for path in sorted(folder.rglob("*.*")):
        image, expected = (
            library.load_img(path, color_mode, interpolation=interpolation, **size)
            for library in (dp.utils, keras.utils)
        )
        assert (image.mode, image.size) == (expected.mode, expected.size)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("data_format", [None, "channels_first"])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays(keras, float32, tmp_path, data_format, scale, channels):
    shape = (5, 6, channels) if data_format is None else (channels, 5, 6)
    for x in (RNG.random(shape) * 255, RNG.integers(0, 300 if channels == 1 else 255, shape), np.zeros(shape)):
        image, expected = (library.array_to_img(x, data_format, scale) for library in (dp.utils, keras.utils))
        assert (image.mode, image.size) == (expected.mode, expected.size)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
        back = [library.img_to_array(expected, data_format) for library in (dp.utils, keras.utils)]
        np.testing.assert_array_equal(*back)
        assert back[0].dtype == back[1].dtype
        for ending in ("png", "bmp", "jpg") if expected.mode != "I" else ():
            written = []
            for library in (dp.utils, keras.utils):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # JPEG has no transparency
                    library.save_img(tmp_path / f"x.{ending}", x, data_format, scale=scale)
                written.append((tmp_path / f"x.{ending}").read_bytes())
            assert written[0] == written[1]
    content = io.BytesIO()
    dp.utils.save_img(content, np.zeros(shape), data_format, "png")
    assert content.getvalue()[:4] == b"\x89PNG"


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize(("shape", "size"), [((7, 12, 3), (5, 5)), ((2, 12, 7, 3), (9, 20))])
def test_smart_resize(keras, float32, data_format, shape, size):
    x = RNG.random(shape).astype(np.float32)
    x = x if data_format == "channels_last" else np.moveaxis(x, -1, -3)
    resized, expected = (
        library.preprocessing.image.smart_resize(x, size, "nearest" if size[0] == 5 else "bilinear", data_format)
        for library in (dp, keras)
    )
    assert isinstance(resized, np.ndarray)
    np.testing.assert_allclose(resized, expected, rtol=1e-5, atol=1e-6)
    assert (
        dp.preprocessing.image.smart_resize(dp.ops.convert_to_tensor(x), size, data_format=data_format).ndim == x.ndim
    )
