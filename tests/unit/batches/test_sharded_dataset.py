"""Batches of shards: every format, any number of parts, order, stages, mixes, and what is refused."""

import io
import itertools
import json
import os
import re
import tarfile

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches.adapters import PyDatasetSource
from dptrain.data.shards.parquet_shards import ParquetFormat
from dptrain.errors import ConfigError, DataError, OutputError
from tests.unit.data.shards.shard_files import windows, write_parquet, write_tar, write_tokens

ShardedDataset = dp.utils.ShardedDataset


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))


def message(error: type[Exception], *arguments, **options) -> str:
    """Return the message with which a data set is refused."""
    with pytest.raises(error) as refused:
        ShardedDataset(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Token shards


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path, [101, 41, 0, 7, 203])


def test_windows_of_all_shards_once_with_the_next_ids(tmp_path, tokens):
    data = ShardedDataset(str(tmp_path), 4, sequence_length=10, shards_per_block=2, seed=3)
    assert data.num_samples == len(windows(tokens, 10)) == 34
    batches = list(data)
    assert [len(x) for x, _ in batches] == [4] * 8 + [2]
    samples = [(a.tolist(), b.tolist()) for x, y in batches for a, b in zip(x, y, strict=True)]
    assert sorted(samples) == sorted(windows(tokens, 10))
    assert samples != windows(tokens, 10)
    again = [(a.tolist(), b.tolist()) for x, y in data for a, b in zip(x, y, strict=True)]
    assert again != samples
    assert sorted(again) == sorted(samples)


def test_without_shuffling_windows_come_in_order(tmp_path, tokens):
    data = ShardedDataset(tmp_path / "t*.bin", 5, shuffle=False, sequence_length=10)
    samples = [(a.tolist(), b.tolist()) for x, y in data for a, b in zip(x, y, strict=True)]
    assert samples == windows(tokens, 10)


@pytest.mark.parametrize("parts", [2, 3, 5, 40])
def test_parts_of_a_batch_are_the_batch(tmp_path, tokens, parts):
    data = ShardedDataset(str(tmp_path), 7, sequence_length=10, seed=1)
    for index in range(len(data)):
        whole = data[index]
        pieces = [data.shard(index, part, parts) for part in range(parts)]
        for column in range(2):
            joined = np.concatenate([piece[column] for piece in pieces])
            assert joined.dtype == whole[column].dtype
            assert joined.tolist() == whole[column].tolist()


def test_headers_of_llm_c_and_npy_files_are_read(tmp_path):
    ids = np.arange(50, dtype=np.uint16)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 50
    (tmp_path / "a.bin").write_bytes(header.tobytes() + ids.tobytes())
    header[:3] = 20240801, 7, 50
    (tmp_path / "b.bin").write_bytes(header.tobytes() + ids.astype(np.uint32).tobytes())
    np.save(tmp_path / "c.npy", ids)
    ids.astype(np.uint32).tofile(tmp_path / "d.bin")
    for name, options in {"a.bin": {}, "b.bin": {}, "c.npy": {}, "d.bin": {"token_dtype": "uint32"}}.items():
        x, y = ShardedDataset(str(tmp_path / name), 9, False, sequence_length=7, **options)[0]
        assert x.ravel().tolist() == list(range(49)), name
        assert y.ravel().tolist() == list(range(1, 50)), name


def hostile_tokens(folder):
    """Yield damaged token shards, and what their message says."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 2**30
    (folder / "claims.bin").write_bytes(header.tobytes() + bytes(100))
    yield "claims.bin", "claims.bin: truncated: its header declares 1,073,741,824 tokens = 2,147,484,672 bytes, it has"
    header[:3] = 20240520, 1, -5
    (folder / "negative.bin").write_bytes(header.tobytes())
    yield "negative.bin", "declares -5 tokens"
    header[:3] = 20240520, 3, 5
    (folder / "version.bin").write_bytes(header.tobytes() + bytes(10))
    yield "version.bin", "version 3 of llm.c's shards, expected 1"
    (folder / "odd.bin").write_bytes(bytes(101))
    yield "odd.bin", "101 bytes are no multiple of the 2 of an id of uint16"
    (folder / "magic.npy").write_bytes(b"<!DOCTYPE html>" * 10)
    yield "magic.npy", "not an .npy file (first bytes 3c21444f4354), expected 934e554d5059"
    np.save(folder / "floats.npy", np.zeros(30))
    yield "floats.npy", "float64 of shape (30,); expected integers in one row"
    np.lib.format.write_array_header_1_0(
        (content := io.BytesIO()), {"descr": "<u2", "fortran_order": False, "shape": (2**40,)}
    )
    (folder / "huge.npy").write_bytes(content.getvalue() + bytes(64))
    yield "huge.npy", "its header declares 1,099,511,627,776 tokens"


def test_damaged_token_shards_are_refused_and_left_out(tmp_path):
    cases = list(hostile_tokens(tmp_path))
    write_tokens(tmp_path, [50])
    for name, expected in cases:
        assert expected in message(DataError, str(tmp_path / name), sequence_length=4)
        with pytest.warns(UserWarning, match="skipped 1 of 2 shards"):
            data = ShardedDataset([tmp_path / name, tmp_path / "t0.bin"], sequence_length=4, bad_shards="skip")
        assert data.num_samples == 12
        assert expected in data.skipped[0]


def test_ids_beyond_the_vocabulary_are_named_with_their_offset(tmp_path):
    ids = np.arange(40, dtype=np.uint16)
    ids[23] = 500
    ids.tofile(tmp_path / "t.bin")
    data = ShardedDataset(str(tmp_path / "t.bin"), 8, False, sequence_length=5, vocabulary_size=40)
    with pytest.raises(DataError, match=r"t\.bin: id 500 at token 23 \(byte 46\); expected 0 to 39"):
        data[0]


@pytest.mark.parametrize("token", [0, 4, 5, 7, 23, 38, 40])
@pytest.mark.parametrize("kind", ["uint16", "uint32", "llm.c", "int64 of NumPy"])
def test_an_id_is_named_with_its_place_in_the_file_wherever_it_stands_in_a_batch(tmp_path, token, kind):
    dtype = kind if kind.startswith("uint") else "uint16" if kind == "llm.c" else "int64"
    ids = np.arange(41).astype(dtype)
    ids[token] = 500
    header, content = b"", io.BytesIO()
    if kind == "llm.c":
        header = np.array([20240520, 1, 41, *[0] * 253], "<i4").tobytes()
    elif dtype == "int64":
        np.save(content, ids)
        header = content.getvalue()[: -ids.nbytes]
    path = tmp_path / ("t.npy" if dtype == "int64" else "t.bin")
    path.write_bytes(header + ids.tobytes())
    options = {"sequence_length": 5, "vocabulary_size": 41} | ({"token_dtype": kind} if kind == dtype else {})
    for batch_size, shuffle, seed in ((8, False, 0), (3, False, 0), (1, False, 0), (4, True, 1), (8, True, 2)):
        data = ShardedDataset(str(path), batch_size, shuffle, seed=seed, **options)
        where = f"{path.name}: id 500 at token {token} (byte {len(header) + token * ids.itemsize:,}); expected"
        with pytest.raises(DataError, match=re.escape(where)):
            list(data)


def test_a_shard_that_shrinks_or_changes_is_noticed(tmp_path):
    ids = np.arange(400, dtype=np.uint16)
    ids.tofile(tmp_path / "t.bin")
    data = ShardedDataset(str(tmp_path / "t.bin"), 8, False, sequence_length=5)
    os.truncate(tmp_path / "t.bin", 100)
    with pytest.raises(DataError, match=r"t\.bin: has changed \(100 bytes, 800 when it was listed\)"):
        data[0]
    ids.tofile(tmp_path / "t.bin")
    os.utime(tmp_path / "t.bin", ns=(1, 1))
    with pytest.raises(DataError, match=r"has changed \(version 1, "):
        data[0]
    data = ShardedDataset(str(tmp_path / "t.bin"), 8, False, sequence_length=5)
    data[0]
    os.truncate(tmp_path / "t.bin", 100)
    with pytest.raises(DataError, match=r"t\.bin: truncated at byte 100, expected 172 or more"):
        data[2]


# Tars


def png(pixels) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    content = io.BytesIO()
    image.fromarray(np.asarray(pixels, np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (9, 6, 5, 3))
    for shard in range(3):
        write_tar(
            tmp_path / f"p{shard}.tar",
            [{"png": png(pixels[i]), "cls": str(i).encode()} for i in range(3 * shard, 3 * shard + 3)],
        )
    return pixels


def test_pictures_with_classes_are_x_and_y(tmp_path, pictures):
    data = ShardedDataset(f"{tmp_path}/p{{0..2}}.tar", 4, seed=0)
    labels = []
    for x, y in data:
        assert x.dtype == np.uint8
        np.testing.assert_array_equal(x, pictures[y])
        labels += y.tolist()
    assert sorted(labels) == list(range(9))
    x, _ = ShardedDataset(str(tmp_path), 4, image_size=(3, 4))[0]
    assert (x.shape, x.dtype) == ((4, 3, 4, 3), np.float32)


def test_members_of_other_kinds(tmp_path):
    array = io.BytesIO()
    np.save(array, np.arange(3.0))
    sample = {
        "json": b'{"label": 3, "w": 0.5}',
        "txt": "gr\u00fc\u00dfe".encode(),
        "npy": array.getvalue(),
        "bin": b"\0\1",
    }
    write_tar(tmp_path / "a.tar", [sample, sample])
    batch = ShardedDataset(str(tmp_path / "a.tar"), 2)[0]
    assert batch["json"][0] == {"label": 3, "w": 0.5}
    assert batch["txt"].tolist() == ["gr\u00fc\u00dfe"] * 2
    assert batch["npy"].tolist() == [[0, 1, 2]] * 2
    assert batch["bin"].tolist() == [b"\0\1"] * 2
    x, y = ShardedDataset(str(tmp_path / "a.tar"), 2, target="label").map(lambda x, y: (x["npy"], y))[0]
    assert (x.shape, y.tolist()) == ((2, 3), [3, 3])
    with pytest.raises(DataError, match=r"target = 'other': a \.json member has no such key"):
        ShardedDataset(str(tmp_path / "a.tar"), 2, target="other")[0]


def test_damaged_tars_are_refused(tmp_path):
    write_tar(good := tmp_path / "good.tar", [{"cls": b"1", "txt": b"a" * 1000}] * 3)
    content = good.read_bytes()
    cases = {
        "cut.tar": (content[: 512 * 3], r"cut.tar: truncated: 00000.txt ends at byte 2,536, the file at 1,536"),
        "header.tar": (content[: 512 * 5 + 100], "header.tar: truncated"),
        "endless.tar": (content[: 512 * 5], "endless.tar: truncated behind byte 2,560: it has no end mark"),
        "html.tar": (b"<html>" * 300, "html.tar: not a tar file, or damaged behind byte 0"),
        "empty.tar": (b"", "empty.tar: empty (0 bytes), expected a tar file"),
    }
    for name, (damaged, expected) in cases.items():
        (tmp_path / name).write_bytes(damaged)
        assert expected in message(DataError, str(tmp_path / name)), name
        with pytest.warns(UserWarning, match="skipped 1 of 2 shards"):
            data = ShardedDataset([good, tmp_path / name], 2, bad_shards="skip")
        assert data.num_samples == 3
    write_tar(tmp_path / "lacks.tar", [{"cls": b"1", "txt": b"a"}, {"cls": b"1"}])
    assert "sample 00001 has no .txt, the first has .cls, .txt" in message(DataError, str(tmp_path / "lacks.tar"))
    write_tar(tmp_path / "other.tar", [{"cls": b"1"}])
    assert "other.tar: its samples are members cls; those of" in message(DataError, [good, tmp_path / "other.tar"])
    write_tar(tmp_path / "word.tar", [{"cls": b"cat"}])
    with pytest.raises(DataError, match=r"word.tar, 00000.cls: b'cat', expected an integer"):
        ShardedDataset(str(tmp_path / "word.tar"))[0]
    write_tar(tmp_path / "picture.tar", [{"png": b"\x89PNG\r\n\x1a\n" + b"x" * 50, "cls": b"1"}])
    if pytest.importorskip("PIL", reason="pictures need Pillow"):
        with pytest.raises(DataError, match=r"picture.tar, 00000.png: "):
            ShardedDataset(str(tmp_path / "picture.tar"))[0]


def test_names_that_are_no_text(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    with tarfile.open(os.path.join(folder, b"\xfe\n.tar").decode("utf-8", "surrogateescape"), "w") as archive:
        member = tarfile.TarInfo("caf\udce9.cls")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"7"))
    assert ShardedDataset(os.fsdecode(folder), 1)[0].tolist() == [7]
    with open(os.path.join(folder, b"\xfd.tar"), "wb"):
        pass
    assert r"\udcfd.tar: empty (0 bytes)" in message(DataError, os.fsdecode(folder))


# Parquet


@pytest.fixture
def tables(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    ends = np.cumsum([0, 5, 12, 1])
    columns = {
        "a": np.linspace(0, 1, 18),
        "n": np.arange(18),
        "ids": [[i, i + 1, i + 2] for i in range(18)],
        "text": [f"text {i}" for i in range(18)],
        "ragged": [[1] * (i % 3) for i in range(18)],
    }
    for index, (start, stop) in enumerate(itertools.pairwise(ends.tolist())):
        part = {name: column[start:stop] for name, column in columns.items()}
        write_parquet(tmp_path / f"{index}.parquet", part, row_group_size=4)
    return columns


def test_columns_of_parquet_files(tmp_path, tables):
    data = ShardedDataset(str(tmp_path / "*.parquet"), 7, seed=5)
    rows = []
    for batch in data:
        n = batch["n"]
        rows += n.tolist()
        np.testing.assert_array_equal(batch["a"], tables["a"][n])
        assert batch["ids"].tolist() == [tables["ids"][i] for i in n]
        assert batch["text"].tolist() == [tables["text"][i] for i in n]
        assert [len(each) for each in batch["ragged"]] == [i % 3 for i in n.tolist()]
    assert sorted(rows) == list(range(18))
    x, y = ShardedDataset(str(tmp_path / "*.parquet"), 7, columns=["a", "n"], target="n")[0]
    np.testing.assert_array_equal(x, tables["a"][y])
    x, y = ShardedDataset(str(tmp_path / "*.parquet"), 7, False, columns=["a", "n", "ids"], target="ids")[0]
    assert (x.dtype, x[:, 1].tolist()) == (np.float32, list(range(7)))


def test_bad_parquet_files_are_refused(tmp_path, tables):
    good, bad = tmp_path / "0.parquet", tmp_path / "x.parquet"
    content = good.read_bytes()
    for damaged in (b"", b"PAR1", content[:-20], content[: len(content) // 2], b"<html>" * 40):
        bad.write_bytes(damaged)
        assert "x.parquet: not a Parquet file, or damaged" in message(DataError, [good, bad])
    write_parquet(bad, {"a": [1.0], "b": [2.0]})
    assert "x.parquet: its samples are columns a: double, b: double; those of" in message(DataError, [good, bad])
    assert "x.parquet: has no column 'zz'; it has ['a', 'b']" in message(DataError, bad, columns=["zz"])
    write_parquet(bad, {"a": [1.0, None]})
    with pytest.raises(DataError, match=r"x.parquet, column 'a': 1 missing values, the first in row 1; fill them"):
        ShardedDataset(bad)[0]
    write_parquet(bad, {"a": [{"b": 1}]})
    with pytest.raises(DataError, match=r"x.parquet, column 'a': holds struct<b: int64>; expected numbers, texts"):
        ShardedDataset(bad)[0]
    write_parquet(bad, {"a": np.zeros(100_000)})
    with pytest.raises(DataError, match=r"x.parquet: takes .* or more in memory > max_bytes = 100.0 kB"):
        ShardedDataset(bad, max_bytes=100_000)[0]


def test_a_damaged_shard_gives_its_place_to_others(tmp_path, tables):
    data = ShardedDataset(str(tmp_path / "*.parquet"), 6, False, bad_shards="skip", columns=["n"])
    body = bytearray((tmp_path / "1.parquet").read_bytes())
    footer = int.from_bytes(body[-8:-4], "little") + 8
    body[4:-footer] = bytes(len(body) - footer - 4)
    stamp = os.stat(tmp_path / "1.parquet").st_mtime_ns
    (tmp_path / "1.parquet").write_bytes(body)
    os.utime(tmp_path / "1.parquet", ns=(stamp, stamp))
    with pytest.warns(UserWarning, match=r"skipped: .*1.parquet: not a Parquet file, or damaged"):
        batches = [data[index].tolist() for index in range(3)]
    assert [len(batch) for batch in batches] == [6, 6, 6]
    assert set(itertools.chain(*batches)) <= {0, 1, 2, 3, 4, 17}
    assert len(data.skipped) == 1
    stopped = ShardedDataset(str(tmp_path / "*.parquet"), 6, False, columns=["n"])
    with pytest.raises(DataError, match=r"1\.parquet: not a Parquet file, or damaged"):
        stopped[1]


@pytest.mark.long
def test_copies_that_are_damaged_or_removed_are_made_again(tmp_path, tables):
    options = {"columns": ["n"], "cache_dir": tmp_path / "copies"}
    expected = list(range(18))
    assert ShardedDataset(str(tmp_path / "*.parquet"), 18, False, **options)[0].tolist() == expected
    copies = [path for path in (tmp_path / "copies").iterdir() if path.suffix != ".lock"]
    assert len(copies) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in copies)
    copies[0].write_bytes(b"nonsense")
    copies[1].unlink()
    copies[2].unlink()
    copies[2].symlink_to(tmp_path / "elsewhere")
    assert ShardedDataset(str(tmp_path / "*.parquet"), 18, False, **options)[0].tolist() == expected
    assert not (tmp_path / "elsewhere").exists()


def test_a_cache_that_cannot_be_written_is_said(tmp_path, tables):
    (tmp_path / "file").touch()
    data = ShardedDataset(str(tmp_path / "*.parquet"), 18, False, columns=["n"], cache_dir=tmp_path / "file")
    with pytest.raises(OutputError, match=r"file: .*; make room, lower cache_bytes, or choose another folder"):
        data[0]


# Stages, mixes, index


def test_map_filter_and_take_leave_the_original_alone(tmp_path, tokens):
    data = ShardedDataset(str(tmp_path), 8, False, sequence_length=10)
    changed = data.map(lambda x, y: (x + 1000, y)).filter(lambda x, y: x[:, 0] % 2 == 0).take(20)
    kept = [a for a, _ in windows(tokens, 10)[:20] if a[0] % 2 == 0]
    assert [row for x, _ in changed for row in x.tolist()] == [[value + 1000 for value in row] for row in kept]
    assert (len(changed), len(data)) == (3, 5)
    parts = [changed.shard(1, part, 3)[0].tolist() for part in range(3)]
    assert list(itertools.chain(*parts)) == changed[1][0].tolist()
    with pytest.raises(ConfigError, match=r"filter: expected 8 booleans, one a sample, found float64 \(8, 10\)"):
        data.filter(lambda x, y: x * 0.5)[0]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_batch_that_would_be_empty_has_the_sample_before_it(tmp_path, parts):
    np.arange(41, dtype=np.uint16).tofile(tmp_path / "t.bin")
    data = ShardedDataset(str(tmp_path), 8, False, sequence_length=1)

    def batches(keep) -> list[list[int]]:
        kept = data.filter(lambda x, y: keep(x[:, 0]))
        pieces = [[kept.shard(index, part, parts) for part in range(parts)] for index in range(5)]
        return [[int(x) for piece in batch for x in piece[0][:, 0]] for batch in pieces]

    assert batches(lambda x: x < 10) == [list(range(8)), [8, 9], [9], [9], [9]]
    assert batches(lambda x: x == 30) == [[30], [30], [30], [30], [30]]
    with pytest.raises(DataError, match="filter leaves none of the samples"):
        batches(lambda x: x < 0)


def test_a_mix_has_its_shares_and_goes_on_in_the_next_pass(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    np.arange(41, dtype=np.uint16).tofile(tmp_path / "a/t.bin")
    np.arange(1000, 1021, dtype=np.uint16).tofile(tmp_path / "b/t.bin")
    a, b = (ShardedDataset(str(tmp_path / name), 4, False, sequence_length=1) for name in "ab")
    mix = ShardedDataset.mix([a, b.filter(lambda x, y: x[:, 0] != 1003)], [3, 1], batch_size=16, seed=2)
    assert (mix.num_samples, len(mix)) == (60, 4)
    ids = [x[:, 0].tolist() for x, _ in mix]
    both = list(itertools.chain(*ids))
    from_a = [value for value in both if value < 1000]
    assert from_a == [value % 40 for value in range(len(from_a))]
    assert 38 <= len(from_a) <= 52
    assert 1003 not in both
    parts = [mix.shard(2, part, 5)[0][:, 0].tolist() for part in range(5)]
    assert list(itertools.chain(*parts)) == ids[2]
    second = [x[:, 0].tolist() for x, _ in mix]
    assert second != ids
    with pytest.raises(ConfigError, match="1 weights for 2 data sets"):
        ShardedDataset.mix([a, b], [1])
    with pytest.raises(ConfigError, match="expected a list of ShardedDatasets"):
        ShardedDataset.mix([[1, 2]])


def test_an_index_saves_measuring_and_guards_content(tmp_path, tables, monkeypatch):
    from dptrain.cli.main import main

    assert main(["index", str(tmp_path / "*.parquet")]) == 0
    index = json.loads((tmp_path / "dptrain-index.json").read_bytes())
    assert [entry["length"] for entry in index["shards"].values()] == [5, 12, 1]
    monkeypatch.setattr(ParquetFormat, "extents", None)  # nothing is measured
    data = ShardedDataset(str(tmp_path / "*.parquet"), 18, False, columns=["n"])
    assert data[0].tolist() == list(range(18))
    body = bytearray((tmp_path / "1.parquet").read_bytes())
    body[10] ^= 1
    (tmp_path / "1.parquet").write_bytes(body)
    data = ShardedDataset(str(tmp_path / "*.parquet"), 18, False, columns=["n"])
    with pytest.raises(DataError, match=r"1\.parquet: SHA-256 .*\.\.\. by the index; it is damaged: write it again"):
        data[0]
    (tmp_path / "1.parquet").write_bytes(bytes(body) + b"more")
    assert "bytes, " in message(DataError, str(tmp_path / "*.parquet"))
    for damaged in (
        b"{",
        b"[]",
        b'{"format": 1, "version": 1}',
        b'{"format": "dptrain shards", "version": 1, "shards": 3}',
    ):
        (tmp_path / "dptrain-index.json").write_bytes(damaged)
        assert "dptrain-index.json: " in message(DataError, str(tmp_path / "*.parquet"))


# Arguments, listing


def test_what_cannot_be_a_stream_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(100))
    (tmp_path / "y.tar").write_bytes(bytes(1024))
    (tmp_path / "z.csv").write_bytes(b"a,b\n")
    (tmp_path / "none").mkdir()
    cases = [
        (DataError, f"{tmp_path}/no*.bin", {}, "no*.bin: matches no file; expected files that end in .parquet, .tar"),
        (DataError, f"{tmp_path}/none", {}, "none: has no shards; expected files"),
        (DataError, f"{tmp_path}/gone.bin", {}, "gone.bin: No such file or directory"),
        (DataError, f"{tmp_path}/z.csv", {}, "z.csv: not a shard by its ending"),
        (DataError, [f"{tmp_path}/x.bin", f"{tmp_path}/y.tar"], {}, "expected shards of one format"),
        (ConfigError, f"{tmp_path}/x.bin", {}, "shards of token ids need sequence_length="),
        (DataError, f"{tmp_path}/y.tar", {}, "no samples in 1 shards; expected at least one"),
        (ConfigError, f"{tmp_path}/x{{9..1}}.bin", {}, "expected a rising range of at most"),
        (ConfigError, f"{tmp_path}/x{{0..99999999999}}.bin", {}, "expected a rising range of at most"),
        (ConfigError, [], {}, "expected paths, addresses, globs or folders"),
        (ConfigError, "x", {"batch_size": "4"}, "batch_size"),
        (ConfigError, "x", {"sequence_length": 0}, "sequence_length = 0: expected an integer >= 1"),
        (ConfigError, "x", {"bad_shards": "no"}, "bad_shards = 'no': expected 'stop' or 'skip'"),
        (ConfigError, "x", {"token_dtype": "int8"}, "token_dtype = 'int8': expected 'uint16' or 'uint32'"),
        (ConfigError, "x", {"seed": -1}, "seed = -1: expected 0 or more"),
    ]
    for error, urls, options, expected in cases:
        assert expected in message(error, urls, **options)


def test_fit_keeps_the_order_and_its_facts_do_not_depend_on_ranks(tmp_path, tokens):
    data = ShardedDataset(str(tmp_path), 8, seed=4, sequence_length=10)
    alone, two = (PyDatasetSource(data, shuffle=True, seed=1, rank=0, world=world) for world in (1, 2))
    for source, first in ((alone, data[0][0]), (two, data.shard(0, 0, 2)[0])):
        assert next(source.start(0))()[0].tolist() == first.tolist()
    assert alone.order == two.order == data.describe_order()
    other = ShardedDataset(str(tmp_path), 8, seed=5, sequence_length=10)
    assert other.describe_order() != data.describe_order()


def test_shards_are_closed_beyond_the_memory(tmp_path):
    for index in range(6):
        write_tar(tmp_path / f"{index}.tar", [{"cls": str(row).encode()} for row in range(100)])
    data = ShardedDataset(str(tmp_path), 100, False, max_bytes=5000)
    for index in range(6):
        assert data[index].tolist() == list(range(100))
        open_shards = data._set._readers
        assert len(open_shards) <= 2
