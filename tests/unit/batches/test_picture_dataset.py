"""Folders of pictures as batches: files, labels, parts, orders, decoding, and what is no picture."""

import os

import numpy as np
import pytest
from PIL import Image

import dptrain as dp
from dptrain.batches.adapters import PyDatasetSource
from dptrain.errors import ConfigError, DataError

CLASSES = ("cat", "dog", "owl")
SIZE = (5, 6)


@pytest.fixture
def folder(tmp_path):
    """A folder of three classes with three, four and five grey pictures, whose shade says which one it is."""
    for label, name in enumerate(CLASSES):
        (tmp_path / "pets" / name / "deep").mkdir(parents=True)
        for number in range(3 + label):
            where = tmp_path / "pets" / name / ("deep" if number == 0 else ".")
            Image.new("RGB", (6, 5), (10 * label + number,) * 3).save(where / f"{number}.png")
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no picture, and not named as one")
    (tmp_path / "pets" / ".git").mkdir()
    return tmp_path / "pets"


def read(folder, **options):
    defaults = {"image_size": SIZE, "batch_size": 5, "verbose": False, "shuffle": False}
    return dp.utils.image_dataset_from_directory(folder, **{**defaults, **options})


def all_of(dataset):
    batches = list(dataset)
    if isinstance(batches[0], tuple):
        return tuple(np.concatenate(columns) for columns in zip(*batches, strict=True))
    return np.concatenate(batches)


def shades(dataset):
    return all_of(dataset)[0][:, 0, 0, 0].astype(int).tolist()


def test_folders_are_classes(folder, capsys):
    dataset = read(folder, verbose=True)
    assert capsys.readouterr().out == "Found 12 files belonging to 3 classes.\n"
    assert dataset.class_names == list(CLASSES)
    assert len(dataset) == 3
    x, y = all_of(dataset)
    assert (x.shape, x.dtype, y.dtype) == ((12, 5, 6, 3), np.float32, np.int32)
    np.testing.assert_array_equal(y, [0] * 3 + [1] * 4 + [2] * 5)
    np.testing.assert_array_equal(x[:, 2, 3, 1].astype(int) // 10, y)
    assert dataset.file_paths[0] == str(folder / "cat" / "1.png")
    assert dataset.file_paths[2] == str(folder / "cat" / "deep" / "0.png")


def test_labels(folder):
    one_hot = all_of(read(folder, label_mode="categorical"))[1]
    np.testing.assert_array_equal(one_hot, np.eye(3, dtype=np.float32)[[0] * 3 + [1] * 4 + [2] * 5])
    binary = read(folder, label_mode="binary", class_names=["owl", "cat"])
    np.testing.assert_array_equal(all_of(binary)[1], [[0.0]] * 5 + [[1.0]] * 3)
    assert binary.class_names == ["owl", "cat"]
    dataset = read(folder, labels=[7, 5] * 6)
    assert (dataset.class_names, all_of(dataset)[1].tolist()) == (["5", "7"], [7, 5] * 6)
    for options in ({"labels": None}, {"label_mode": None}):
        alone = read(folder, **options)
        assert (all_of(alone).shape, alone.class_names) == ((12, 5, 6, 3), None)


def test_colours_and_formats(folder):
    assert all_of(read(folder, color_mode="grayscale"))[0].shape == (12, 5, 6, 1)
    assert all_of(read(folder, color_mode="rgba"))[0][0, 0, 0].tolist() == [1, 1, 1, 255]
    first = all_of(read(folder, data_format="channels_first", image_size=4))[0]
    np.testing.assert_array_equal(first, np.moveaxis(all_of(read(folder, image_size=4))[0], 3, 1))


def test_parts_are_those_of_a_seed_and_do_not_overlap(folder):
    options = {"validation_split": 0.3, "seed": 4, "shuffle": True}
    train, validation = read(folder, subset="both", **options)
    assert (len(train.file_paths), len(validation.file_paths)) == (9, 3)
    assert not set(train.file_paths) & set(validation.file_paths)
    assert read(folder, subset="training", **options).file_paths == train.file_paths
    assert read(folder, subset="validation", **options).file_paths == validation.file_paths
    assert read(folder, subset="validation", **{**options, "seed": 5}).file_paths != validation.file_paths


def test_each_pass_has_another_order_of_its_own(folder):
    options = {"shuffle": True, "seed": 1}
    dataset, again = read(folder, **options), read(folder, **options)
    first, second = shades(dataset), shades(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(shades(read(folder)))
    again.on_pass_begin(1)
    assert [int(x[0, 0, 0]) for index in range(3) for x in again[index][0]] == second
    source = PyDatasetSource(again)
    assert [int(x[0, 0, 0]) for draw in source.start(0) for x in draw()[0]] == first


def test_a_rank_decodes_its_part_alone(folder, monkeypatch):
    dataset, opened = read(folder), []
    real = type(dataset._decoding).read
    monkeypatch.setattr(
        type(dataset._decoding), "read", lambda *arguments: opened.append(arguments[1].name) or real(*arguments)
    )
    batch = dataset[1]
    opened.clear()
    parts = [dataset.shard(1, part, 3) for part in range(3)]
    assert len(opened) == 5
    assert [len(x) for x, _ in parts] == [1, 2, 2]
    for array, cut in zip(batch, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(array, np.concatenate(cut))


def test_training(folder):
    train, validation = read(folder, subset="both", validation_split=0.25, seed=3, shuffle=True)
    layers = [dp.layers.Rescaling(1 / 255), dp.layers.Flatten(), dp.layers.Dense(3, "softmax")]
    model = dp.Sequential([dp.layers.Input((*SIZE, 3)), *layers], seed=1)
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    history = model.fit(train, epochs=3, validation_data=validation, verbose=0).history
    assert set(history) == {"loss", "val_loss"}
    assert model.predict(read(folder), verbose=0).shape == (12, 3)


BAD = {
    "no.png": (b"to do", r"dog/no\.png: not a picture; expected PNG"),
    "empty.jpg": (b"", r"dog/empty\.jpg: not a picture"),
    "odd \x1b[31m\udcff.gif": (b"GIF89a", "damaged|not a picture"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_stops_or_is_skipped(folder, name):
    content, message = BAD[name]
    (folder / "dog" / name).write_bytes(content)
    with pytest.raises(DataError, match=f"({message}).*; remove it, or bad='skip'") as caught:
        all_of(read(folder))
    assert "\n" not in str(caught.value)
    dataset = read(folder, bad="skip")
    with pytest.warns(UserWarning, match="skipped: "):
        x, y = all_of(dataset)
    assert (len(x), len(y), dataset.skipped) == (12, 12, [str(folder / "dog" / name)])
    assert len(all_of(dataset)[0]) == 12  # nothing is said twice


def test_a_file_that_is_cut_off(folder):
    path = folder / "cat" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(DataError, match=r"cat/1\.png: damaged"):
        all_of(read(folder))


@pytest.mark.parametrize("limit", [20, 10])
def test_a_bomb_is_refused_by_its_header(folder, monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=r"cat/1\.png: too large"):
        all_of(read(folder))


def test_more_memory_than_asked_for(folder):
    with pytest.raises(DataError, match=r"cat/1\.png: declared 360 bytes > max_bytes = 240 bytes"):
        all_of(read(folder, image_size=(2, 2), batch_size=2, max_bytes=240))
    with pytest.raises(ConfigError, match=r"part of 5 pictures takes 1\.8 kB; max_bytes = 3\.0 kB"):
        read(folder, max_bytes=3000)
    assert read(folder, max_bytes=1800 * 4).max_queue_size == 4
    assert read(folder).max_queue_size == 10


def test_links(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (6, 5), (99,) * 3).save(outside / "x.png")
    (folder / "cat" / "again.png").symlink_to("1.png")
    (folder / "cat" / "loop").symlink_to("..")
    assert len(read(folder).file_paths) == 13
    (folder / "dog" / "x.png").symlink_to(outside / "x.png")
    with pytest.raises(DataError, match=r"dog/x\.png: a link that leads out of .*pets; .* or follow_links=True"):
        read(folder)
    assert 99 in shades(read(folder, follow_links=True))
    (folder / "dog" / "x.png").unlink()
    dataset = read(folder)
    (folder / "cat" / "1.png").unlink()
    (folder / "cat" / "1.png").symlink_to(outside / "x.png")  # meanwhile
    with pytest.raises(DataError, match="a link that leads out of"):
        dataset[0]
    (folder / "cat" / "1.png").unlink()
    (folder / "eel").symlink_to(outside)
    with pytest.raises(DataError, match="eel: a link that leads out of"):
        read(folder)


def test_what_is_no_file_is_not_opened(folder):
    os.mkfifo(folder / "cat" / "pipe.png")
    with pytest.raises(DataError, match=r"pipe\.png: .*named pipe"):
        all_of(read(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "given"}, "`labels` argument should be"),
        ({"labels": [1, 2]}, r"len\(labels\) is 2 while we found 12 files"),
        ({"labels": [0] * 12, "class_names": ["cat"]}, "only pass `class_names` if"),
        ({"class_names": ["cat", "cow"]}, "did not match the names of the subdirectories"),
        ({"label_mode": "one-hot"}, "`label_mode` argument must be"),
        ({"label_mode": "binary"}, "exactly 2 class_names"),
        ({"color_mode": "bgr"}, "`color_mode` must be"),
        ({"image_size": (2, 3, 3)}, "Invalid `image_size`"),
        ({"image_size": (0, 3)}, "Invalid `image_size`"),
        ({"interpolation": "area"}, "unknown interpolation 'area'"),
        ({"crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True}, "Only one of"),
        ({"bad": "ignore"}, "expected 'stop' or 'skip'"),
        ({"batch_size": None}, "batch_size = None: expected an integer"),
        ({"batch_size": 0}, "not supported: batch_size=0"),
        ({"data_format": "last"}, "`data_format` argument"),
        ({"validation_split": 1.0, "subset": "both"}, "between 0 and 1"),
        ({"subset": "both"}, "and inversely"),
        ({"validation_split": 0.2, "subset": "all"}, "`subset` must be"),
        ({"validation_split": 0.2, "subset": "both", "shuffle": True}, "provide a `seed`"),
        ({"validation_split": 0.01, "subset": "validation"}, "No validation images found"),
    ],
)
def test_arguments_that_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(folder, **options)
    assert "\n" not in str(caught.value)


def test_folders_without_pictures(tmp_path):
    with pytest.raises(DataError, match="none: not found, or not a folder"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="No images found"):
        read(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"cat: no pictures .*; remove the folder, or fill it"):
        read(tmp_path)
