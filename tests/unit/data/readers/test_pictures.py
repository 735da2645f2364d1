"""Folders of pictures: classes, sizes, colours, and every file that is no good picture."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from dptrain.comm import SoloCommunicator
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.readers import pictures as module
from dptrain.data.readers.pictures import PictureOptions, encode_pictures, is_picture_folder, load_pictures
from dptrain.errors import AgreedError, ConfigError, DataError
from tests.thread_ranks import on_ranks

PER_CLASS = 5


def pixels(shade, size=(4, 6), mode="RGB"):
    height, width = size
    return Image.new(mode, (width, height), shade if mode == "L" else (shade, 0, 0))


def fill(folder, classes=("cat", "dog"), count=PER_CLASS, size=(4, 6), mode="RGB"):
    for shade, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels(10 * shade + number, size, mode).save(folder / name / f"{number}.png")
    return folder


def load(folder, max_bytes=1 << 20, **options):
    return load_pictures(str(folder), PictureOptions(**options), SoloCommunicator(), max_bytes=max_bytes)


def read_all(data):
    return np.concatenate([data.train.x, data.test.x])


def test_folders_are_classes(tmp_path):
    data = load(fill(tmp_path / "pets"))
    assert (data.name, data.task, data.num_classes) == ("pets", "multiclass", 2)
    assert data.preprocessing == Preprocessing("multiclass", class_names=("cat", "dog"), picture=(4, 6, 3))
    assert (data.train.x.shape, data.test.x.shape, data.train.x.dtype) == ((8, 4, 6, 3), (2, 4, 6, 3), np.uint8)
    for split in (data.train, data.test):  # reds say which picture it is
        assert (np.asarray(split.x)[:, 0, 0, 0] // 10 == split.y).all()
    assert sorted(np.concatenate([data.train.x, data.test.x])[:, 0, 0, 0]) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert data.notes == (
        "10 pictures, 4x6 RGB; 2 classes: cat, dog",
        "2 of 10 samples are held out as the test part; folders train and test name others",
    )


def test_what_tells_of_the_pictures_is_no_class_and_no_fault(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test", count=2)
    for name in ("README.txt", "train/README.txt", "train/labels.csv", "train/dog/README", "test/cat/LICENSE.md"):
        (tmp_path / name).write_text("about the pictures")
    data = load(tmp_path)
    assert (data.num_classes, len(data.train), len(data.test)) == (2, 10, 4)


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_a_level_of_parts(tmp_path, test):
    fill(tmp_path / "train")
    fill(tmp_path / test, count=2)
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (10, 4)


def test_a_part_that_is_not_used_is_told(tmp_path):
    for part in ("train", "test", "val"):
        fill(tmp_path / part)
    assert any("val is not used" in note for note in load(tmp_path).notes)


def test_grey_where_all_are_grey(tmp_path):
    fill(tmp_path, mode="L")
    assert load(tmp_path).train.x.shape == (8, 4, 6, 1)
    pixels(3).save(tmp_path / "cat" / "red.png")
    assert load(tmp_path).train.x.shape == (9, 4, 6, 3)


def test_sizes_that_differ_need_a_size(tmp_path):
    fill(tmp_path)
    pixels(3, (8, 8)).save(tmp_path / "dog" / "9.png")
    with pytest.raises(AgreedError, match=r"2 sizes .*: 4x6 \(10\), 8x8 \(1\); --image-size 4x6 resizes them"):
        load(tmp_path)
    data = load(tmp_path, size=(2, 3))
    assert data.train.x.shape[1:] == (2, 3, 3)
    assert data.preprocessing.resize


def test_a_picture_on_its_side_is_turned(tmp_path):
    fill(tmp_path, size=(6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels(3, (4, 6)).save(tmp_path / "cat" / "turned.jpg", exif=exif)
    assert load(tmp_path).train.x.shape[1:] == (6, 4, 3)


def truncated():
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 6, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()[:-40]


def deep():
    content = io.BytesIO()
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(content, "PNG")
    return content.getvalue()


BAD = {
    "notes.txt": (b"to do", r"dog/notes\.txt: not a picture; expected PNG"),
    "empty.png": (b"", r"dog/empty\.png: not a picture"),
    "cut.png": (truncated(), r"dog/cut\.png: damaged"),
    "deep.png": (deep(), r"dog/deep\.png: pixels of mode I;16; expected 8 bits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_stops_or_is_skipped(tmp_path, name):
    content, message = BAD[name]
    (fill(tmp_path) / "dog" / name).write_bytes(content)
    with pytest.raises((AgreedError, DataError), match=f"{message}.*; remove it, or --bad-pictures skip"):
        read_all(load(tmp_path))  # the header of one that is cut is good
    data = load(tmp_path, bad="skip")
    assert len(data.train) + len(data.test) == 10
    (tmp_path / "dog" / name).unlink()
    good = load(tmp_path)
    for split, other in ((data.train, good.train), (data.test, good.test)):
        np.testing.assert_array_equal(split.x, other.x)
        np.testing.assert_array_equal(split.y, other.y)
    assert any(note.startswith("skipped: ") and name in note for note in data.notes)


@pytest.mark.parametrize("limit", [20, 10])  # beyond the limit Pillow warns, beyond twice the limit it refuses
def test_a_bomb_is_refused_by_its_header(tmp_path, monkeypatch, limit):
    fill(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(AgreedError, match=r"cat/0\.png: too large: .*5 such files in all"):
        load(tmp_path)


@pytest.mark.parametrize("most", [0, 73, 5 * 73, 10 * 73, 1 << 20])  # no picture stays, one, half of them, all
def test_pictures_are_decoded_again_unless_they_stay(tmp_path, monkeypatch, most):
    decoded, decode = [], module._decoded
    monkeypatch.setattr(module, "_decoded", lambda path, known: decoded.append(path) or decode(path, known))
    data = load(fill(tmp_path), max_bytes=most)
    assert decoded == []
    x = data.train.x
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(x)[:, 0, 0, 0] // 10, data.train.y)
        np.testing.assert_array_equal(np.asarray(x[[3, 1]]), np.asarray(x)[[3, 1]])
    counts = [decoded.count(path) for path in sorted(set(decoded))]
    stay = min(most // 73, 10)
    assert len(counts) == 8
    assert sum(count == 1 for count in counts) == {0: 0, 1: 1, 5: 4, 10: 8}[stay]


def test_a_class_without_a_good_picture_is_told(tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "dog").iterdir():
        path.write_bytes(truncated())
    with pytest.raises(AgreedError, match="no good picture of class 'dog'"):
        load(tmp_path, bad="skip")


@pytest.mark.parametrize("bad", ["stop", "skip"])
def test_ranks_share_what_stays_and_look_for_bad_ones_together(tmp_path, bad):
    (fill(tmp_path) / "dog" / "cut.png").write_bytes(truncated())

    def load_on(comm):
        data = load_pictures(str(tmp_path), PictureOptions(bad=bad), comm, max_bytes=4 * 73)
        return [data.notes, data.train.y.tolist(), data.test.y.tolist(), len(data.train)]

    ranks = on_ranks(3, load_on)
    assert ranks == [load_on(SoloCommunicator())] * 3


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda folder: (folder / "eel").mkdir(), "eel: no pictures; remove the folder, or fill it"),
        (lambda folder: pixels(1).save(folder / "0.png"), r"0\.png: a file next to the class folders"),
        (lambda folder: (folder / "cat" / "more").mkdir(), "more: a folder in the folder of a class"),
    ],
)
def test_folders_of_another_shape_are_refused(tmp_path, add, message):
    add(fill(tmp_path))
    with pytest.raises(AgreedError, match=message):
        load(tmp_path)


def test_names_that_are_not_utf8(tmp_path):
    fill(tmp_path, ["cat", os.fsdecode(b"caf\xe9")])
    with pytest.raises(AgreedError, match=r"caf\\udce9: the name of a class folder is not UTF-8; rename it"):
        load(tmp_path)
    (tmp_path / os.fsdecode(b"caf\xe9")).rename(tmp_path / "dog")
    (tmp_path / "dog" / "0.png").rename(tmp_path / "dog" / os.fsdecode(b"\xe9.png"))
    assert len(read_all(load(tmp_path))) == 2 * PER_CLASS  # names of files are kept nowhere


def test_one_class_is_nothing_to_learn(tmp_path):
    with pytest.raises(AgreedError, match="1 folder of pictures; expected one a class"):
        load(fill(tmp_path, ["cat"]))


def test_a_class_of_the_test_part_alone_is_refused(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test", ["cat", "dgo"])
    with pytest.raises(AgreedError, match="class 'dgo', which training has not seen; did you mean 'dog'"):
        load(tmp_path)


def test_hidden_files_are_passed_over(tmp_path):
    fill(tmp_path)
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / "cat" / "Thumbs.db").write_text("x")
    assert len(load(tmp_path).train) == 8


def test_a_folder_of_idx_files_is_none_of_pictures(tmp_path):
    assert not is_picture_folder(tmp_path)
    assert not is_picture_folder(tmp_path / "none")
    assert is_picture_folder(fill(tmp_path))
    (tmp_path / "train-images-idx3-ubyte").write_text("x")
    assert not is_picture_folder(tmp_path)


KNOWN = Preprocessing("multiclass", class_names=("cat", "dog"), picture=(4, 6, 3))


def encoded(path, preprocessing=KNOWN):
    encoded_pictures = encode_pictures(str(path), preprocessing, SoloCommunicator())
    return encoded_pictures.x, encoded_pictures.y


def test_rows_have_the_names_of_their_files_and_bad_ones_are_left_out_where_asked(tmp_path):
    fill(tmp_path)
    (tmp_path / "cat" / "bad.png").write_bytes(b"no picture")
    picture = next((tmp_path / "dog").iterdir())
    (tmp_path / "dog" / "torn.png").write_bytes(picture.read_bytes()[:45])  # its header is good
    with pytest.raises(AgreedError, match="--bad-pictures skip"):
        encoded(tmp_path)
    encoded_pictures = encode_pictures(str(tmp_path), KNOWN, SoloCommunicator(), bad="skip")
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*"))
    assert list(encoded_pictures.files) == [file for file in files if "bad" not in file and "torn" not in file]
    assert len(encoded_pictures.x) == len(encoded_pictures.y) == len(encoded_pictures.files)
    assert ["bad.png" in encoded_pictures.notes[0], "torn.png" in encoded_pictures.notes[1]] == [True, True]
    assert list(encode_pictures(str(picture), KNOWN, SoloCommunicator()).files) == [picture.name]


def test_a_model_takes_folders_of_classes_a_folder_or_a_picture(tmp_path):
    fill(tmp_path)
    x, y = encoded(tmp_path)
    assert (x.shape, y.tolist()) == ((10, 4, 6, 3), [0] * 5 + [1] * 5)
    x, y = encoded(tmp_path / "dog")
    assert (np.asarray(x)[:, 0, 0, 0].tolist(), y) == ([10, 11, 12, 13, 14], None)
    assert np.asarray(encoded(tmp_path / "dog" / "3.png")[0])[:, 0, 0, 0].tolist() == [13]


def test_other_pictures_than_the_training_s_are_refused(tmp_path):
    pixels(3, (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(AgreedError, match=r"a\.png: 8x8, expected 4x6; train with --image-size"):
        encoded(tmp_path / "a.png")
    resized = Preprocessing("multiclass", class_names=("cat", "dog"), picture=(4, 6, 3), resize=True)
    assert encoded(tmp_path / "a.png", resized)[0].shape == (1, 4, 6, 3)
    grey = Preprocessing("multiclass", class_names=("cat", "dog"), picture=(8, 8, 1))
    with pytest.raises(AgreedError, match="in color, and the model was trained on gray pictures"):
        encoded(tmp_path / "a.png", grey)


def test_without_pillow_there_is_advice(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(AgreedError, match=r"pip install 'pillow>=") as caught:
        load(fill_without_pillow(tmp_path))
    assert caught.value.exit_code == ConfigError.exit_code


def fill_without_pillow(folder):
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        (folder / name / "a.png").write_bytes(b"x")
    return folder


def test_links_out_of_the_folder(tmp_path):
    fill(tmp_path / "pets")
    outside = fill(tmp_path / "outside")
    (tmp_path / "pets" / "cat" / "again.png").symlink_to("1.png")
    assert len(load(tmp_path / "pets").train) == 9
    (tmp_path / "pets" / "dog" / "9.png").symlink_to(outside / "dog" / "1.png")
    message = r"dog/9\.png: a link that leads out of .*pets; put the pictures there, or "
    for bad in ("stop", "skip"):
        with pytest.raises(AgreedError, match=f"{message}--follow-links"):
            load(tmp_path / "pets", bad=bad)
    preprocessing = Preprocessing("multiclass", class_names=("cat", "dog"), picture=(4, 6, 3))
    with pytest.raises(AgreedError, match=f"{message}name the folder that it leads to"):
        encode_pictures(str(tmp_path / "pets"), preprocessing, SoloCommunicator())
    data = load(tmp_path / "pets", follow_links=True)
    assert len(data.train) + len(data.test) == 12
    (tmp_path / "pets" / "dog" / "9.png").unlink()
    (tmp_path / "pets" / "owl").symlink_to(outside / "cat")
    with pytest.raises(AgreedError, match="owl: a link that leads out of"):
        load(tmp_path / "pets")
