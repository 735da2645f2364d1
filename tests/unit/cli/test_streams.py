"""What --data takes for shards, and what a network is told of them."""

import numpy as np
import pytest

from dptrain.cli.options.config import DataConfig
from dptrain.cli.streams import is_stream, load_stream
from dptrain.comm import SoloCommunicator
from dptrain.errors import AgreedError, DataError
from tests.unit.data.shards.shard_files import write_parquet, write_tar, write_tokens


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_globs_addresses_tars_and_folders_of_shards_are_streams(folder):
    for name in ("shards", "pictures/cat", "indexed", "mixed"):
        (folder / name).mkdir(parents=True)
    for name in (
        "shards/a.parquet",
        "indexed/a.tar",
        "indexed/dptrain-index.json",
        "mixed/a.tar",
        "mixed/b.txt",
        "x[1].npz",
    ):
        (folder / name).touch()
    streams = ["*.parquet", "a{0..3}.tar", "s3://b/x.parquet", "https://a/b.tar", "a.tar", "t.bin", "shards", "indexed"]
    others = [
        "strokes",
        "mnist",
        "houses.parquet",
        "set.npz",
        "x.npy",
        "pictures",
        "mixed",
        "x[1].npz",
        "images:pictures",
    ]
    assert [name for name in streams if not is_stream(DataConfig(name=name))] == []
    assert [name for name in others if is_stream(DataConfig(name=name))] == []
    assert is_stream(DataConfig(name="x.npy", sequence_length=8))


def loaded(task=None, **fields):
    options = {"batch_size": 8, "seed": 1, "shuffle": True}
    return load_stream(DataConfig(**fields), SoloCommunicator(), task, **options)


def test_tasks_follow_from_the_targets(folder):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    rows = np.arange(20)
    for shard in range(5):
        columns = {"a": rows * 1.0, "b": rows, "c": rows % 3, "two": (rows % 2) * 1.0, "t": [f"w{row}" for row in rows]}
        write_parquet(folder / f"{shard}.parquet", columns)
    data = loaded(name="*.parquet", target="c", columns=("a", "b"))
    assert (data.task, data.num_classes, data.columns, len(data.train), len(data.test)) == ("multiclass", 3, 2, 80, 20)
    assert (data.train.x.shape, data.train.x.dtype) == ((80, 2), np.float32)
    assert len(data.train.first(30)) == 30
    assert loaded(name="*.parquet", target="c", columns=("a",), classes=7).num_classes == 7
    assert loaded(name="*.parquet", target="two", columns=("a",)).task == "binary"
    assert loaded(name="*.parquet", target="a", columns=("b",)).task == "regression"
    apart = loaded(name="[0-3].parquet", target="c", columns=("a",), test_data="4.parquet")
    assert (len(apart.train), len(apart.test)) == (80, 20)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"target": "c"},
            r"x is a \(float64 \(\)\), t \(texts\); expected columns of numbers, or pictures",
        ),
        ({}, "its samples have no targets; --target COLUMN names the targets"),
        ({"target": "t", "columns": ("a",)}, "targets are texts; expected numbers, for classes integers from 0"),
        ({"target": "c", "drop": ("a",)}, "--drop: not supported for streams of shards"),
        ({"target": "c", "columns": ("zz",)}, "has no column 'zz'"),
        ({"name": "0.parquet", "target": "c", "columns": ("a",)}, r"1 shards, the last of 20 samples; name others"),
    ],
)
def test_what_a_network_cannot_take_is_refused(folder, fields, expected):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    for shard in range(3):
        columns = {"a": np.arange(20.0), "c": np.arange(20) % 3, "t": ["w"] * 20}
        write_parquet(folder / f"{shard}.parquet", columns)
    with pytest.raises((AgreedError, DataError), match=expected):
        loaded(**{"name": "*.parquet", **fields})


def test_tars_and_token_shards(folder):
    for shard in range(3):
        write_tar(folder / f"{shard}.tar", [{"cls": b"1", "txt": b"a"}] * 5)
    with pytest.raises(AgreedError, match=r"x is texts; expected columns of numbers"):
        loaded(name="*.tar", target="cls")
    write_tokens(folder, [50, 50, 50])
    data = loaded(name="t*.bin", sequence_length=4, classes=100)
    assert (data.train.x.shape, data.train.y.shape, data.num_classes) == ((24, 4), (24, 4), 100)
    with pytest.raises(
        AgreedError, match=r"id \d+ at token \d+ \(byte \d+\); expected 0 to 9: are these shards of this"
    ):
        loaded(name="t*.bin", sequence_length=4, classes=10)
