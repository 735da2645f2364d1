"""Windows of series, and folders of texts and sounds."""

import wave

import numpy as np
import pytest

from dptrain import utils
from dptrain.errors import ConfigError, DataError


def test_windows_of_a_series():
    data, targets = np.arange(100.0), 2 * np.arange(100.0)
    dataset = utils.timeseries_dataset_from_array(data, targets, sequence_length=9, batch_size=5)
    batches = list(dataset)
    assert [len(x) for x, _ in batches] == [5] * 18 + [2]
    for number, (x, y) in enumerate(batches):
        np.testing.assert_array_equal(y, 2 * np.arange(number * 5, number * 5 + len(x)))
        np.testing.assert_array_equal(x, np.arange(number * 5, number * 5 + len(x))[:, None] + np.arange(9))
    dataset = utils.timeseries_dataset_from_array(data, None, 3, 2, 4, None, start_index=10, end_index=30)
    np.testing.assert_array_equal(dataset[0], np.arange(10, 22, 2)[:, None] + [0, 4, 8])
    shuffled = utils.timeseries_dataset_from_array(data, targets, 9, shuffle=True, seed=3, batch_size=50)
    first, second = (np.concatenate([y for _, y in shuffled]) for _ in range(2))
    assert sorted(first) == sorted(second) == (2 * np.arange(92.0)).tolist()
    assert (first != second).any()
    np.testing.assert_array_equal(np.concatenate([shuffled.shard(0, n, 3)[1] for n in range(3)]), shuffled[0][1])


def test_targets_are_those_of_the_steps_in_use():
    data = np.arange(30.0)
    x, y = utils.timeseries_dataset_from_array(data, 10 * data, 3, 2, 2, None, start_index=7, end_index=20)[0]
    np.testing.assert_array_equal(x[:, 0], np.arange(7, 16, 2))
    np.testing.assert_array_equal(y, 10 * x[:, 0])
    x, y = utils.timeseries_dataset_from_array(data, 10 * data[:10], 3, batch_size=None, start_index=7)[0]
    np.testing.assert_array_equal(x[:, 0], [7, 8, 9])
    np.testing.assert_array_equal(y, [70, 80, 90])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_index": -1}, "`start_index` must be 0 or greater"),
        ({"start_index": 11}, "`start_index` must be lower"),
        ({"end_index": 20}, "`end_index` must be lower"),
        ({"start_index": 5, "end_index": 3}, "`end_index` must be higher than `start_index`"),
        ({"sampling_rate": 0}, "`sampling_rate` must be higher than 0"),
        ({"sequence_stride": 11}, "`sequence_stride` must be lower"),
        ({"format": "np"}, "`format` should be"),
        ({"sequence_length": 11}, "no window of 11 steps"),
        ({"sequence_length": 0}, "`sequence_length` must be higher than 0"),
        ({"batch_size": 0}, "`batch_size` must be higher than 0"),
    ],
)
def test_what_is_no_window(options, message):
    with pytest.raises(ConfigError, match=message):
        utils.timeseries_dataset_from_array(np.arange(10), np.arange(10), **({"sequence_length": 3} | options))


@pytest.fixture
def texts(tmp_path):
    for name in ("neg", "pos"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} film {number} ä", encoding="utf-8")
    (tmp_path / "pos" / "notes.md").write_text("not this")
    return tmp_path


@pytest.fixture
def sounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("sounds")
    for number, name in enumerate(("high", "low")):
        (root / name).mkdir()
        for index in range(5):
            write(root / name / f"{index}.wav", np.full((4, 1), 0.1 * index + 0.05 * number))
    return root


def test_texts_of_a_folder(texts):
    dataset = utils.text_dataset_from_directory(texts, batch_size=4, shuffle=False, verbose=False)
    assert dataset.class_names == ["neg", "pos"]
    batches = list(dataset)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert batches[0][0][0] == "neg film 0 ä"
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), [0] * 5 + [1] * 5)
    mapped = dataset.map(lambda x, y: (np.char.str_len(x), y)).map(lambda x, y: (x * 2, y))
    np.testing.assert_array_equal(mapped[0][0], [24] * 4)
    parts = utils.text_dataset_from_directory(
        texts, batch_size=4, validation_split=0.3, subset="both", seed=1, max_length=3, verbose=False
    )
    assert [sum(len(x) for x, _ in part) for part in parts] == [7, 3]
    assert set(np.concatenate([x for part in parts for x, _ in part])) == {"neg", "pos"}
    assert utils.text_dataset_from_directory(texts, labels=None, verbose=False, batch_size=20)[0].shape == (10,)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"labels": None}, {"seed": 3, "batch_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["texts", "sounds"])
def test_mapped_batches_are_the_batches_mapped(texts, sounds, kind, options):
    """In the same order in each pass, however many maps there are."""
    make = utils.text_dataset_from_directory if kind == "texts" else utils.audio_dataset_from_directory
    options = {"seed": 1, "batch_size": 4, "verbose": False, **options}

    def change(*batch):
        return tuple(np.asarray([f"{value} changed" for value in part.tolist()]) for part in batch)

    plain, mapped = (make(texts if kind == "texts" else sounds, **options) for _ in range(2))
    mapped = mapped.map(change).map(change)
    assert len(mapped) == len(plain)
    for _ in range(2):
        for batch, found in zip(plain, mapped, strict=True):
            expected = change(*change(*(batch if isinstance(batch, tuple) else (batch,))))
            for part, of in zip(found, expected, strict=True):
                np.testing.assert_array_equal(part, of)


def test_what_is_no_folder_of_texts(texts, tmp_path):
    with pytest.raises(DataError, match="more than max_bytes"):
        utils.text_dataset_from_directory(texts, verbose=False, max_bytes=5)[0]
    with pytest.raises(DataError, match="expected a folder of texts"):
        utils.text_dataset_from_directory(texts / "none", verbose=False)
    (texts / "empty").mkdir()
    with pytest.raises(DataError, match=r"no texts \(\.txt\)"):
        utils.text_dataset_from_directory(texts, verbose=False)
    (texts / "empty" / "link.txt").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="a link that leads out of"):
        utils.text_dataset_from_directory(texts, verbose=False)
    with pytest.raises(ConfigError, match="number of text files"):
        utils.text_dataset_from_directory(texts, labels="given")


def write(path, samples, width=2, rate=8000):
    """Write a sound of (samples, channels), of -1 to 1."""
    scaled = np.round(samples * (2.0 ** (8 * width - 1) - 1)).astype("<i4")
    data = (
        (scaled + 128).astype(np.uint8).tobytes()
        if width == 1
        else scaled.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    )
    with wave.open(str(path), "wb") as file:
        file.setparams((samples.shape[1], width, rate, len(samples), "NONE", ""))
        file.writeframes(data)


def test_sounds_of_a_folder(tmp_path):
    for number, name in enumerate(("high", "low")):
        (tmp_path / name).mkdir()
        for length in (30, 50):
            write(tmp_path / name / f"{length}.wav", np.full((length, 1), 0.25 * (1 + number)))
    dataset = utils.audio_dataset_from_directory(tmp_path, batch_size=4, shuffle=False, verbose=False)
    x, y = dataset[0]
    assert x.shape == (4, 50, 1)
    assert y.tolist() == [0, 0, 1, 1]
    assert (x[0, 30:] == 0).all()
    cut = utils.audio_dataset_from_directory(tmp_path, output_sequence_length=20, labels=None, verbose=False)[0]
    assert cut.shape == (4, 20, 1)
    with pytest.raises(DataError, match="8000 samples a second; sampling_rate=16000"):
        utils.audio_dataset_from_directory(tmp_path, sampling_rate=16000, verbose=False)[0]
    with pytest.raises(ConfigError, match="not supported: ragged"):
        utils.audio_dataset_from_directory(tmp_path, ragged=True)
    for content in (b"", b"RIFF", b"ID3 no sound", (tmp_path / "low" / "30.wav").read_bytes()[:30]):
        (tmp_path / "low" / "30.wav").write_bytes(content)
        with pytest.raises(DataError, match=r"not a (whole )?WAV file"):
            utils.audio_dataset_from_directory(tmp_path, verbose=False)[0]
