"""Streams of shards: any number of ranks and any interruption give the bits of one rank; faults end all ranks alike."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import dptrain, python
from tests.unit.data.shards.shard_files import write_tar, write_tokens

SCRIPT = str(ROOT / "tests/mpi/scripts/streams.py")
# Steps of three passes of the mix.
STEPS = 3 * 15
RESUMES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for name, lengths in {"a": [131, 50, 7, 0, 211, 90], "b": [64, 128, 190]}.items():
        (folder / name).mkdir()
        write_tokens(folder / name, lengths, 50)
    return folder


def results(folder: Path, backups: Path, ranks: int, what: str, *steps: int) -> dict[str, list[str]]:
    """Return what a launch of the script writes."""
    out = backups / f"{what}{ranks}.json"
    arguments = [str(folder), str(out), what, *map(str, steps)]
    done = python(ranks, SCRIPT, *arguments, timeout=600, DPTRAIN_CACHE=str(folder / "dptrain"))
    assert (done.code, done.err) == (0, "")
    loaded: dict[str, list[str]] = json.loads(out.read_text())
    return loaded


@pytest.fixture(scope="module")
def expected(folder) -> list[str]:
    """The digest of the weights and the history of one rank that is never interrupted."""
    return results(folder, folder, 0, "whole")["whole"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)])
def test_the_bits_of_one_rank(folder, expected, ranks):
    assert results(folder, folder, ranks, "whole")["whole"] == expected


def check_resumes(folder, backups, expected, steps: list[int], begun_on: int, resumed_on: list[int]) -> None:
    assert results(folder, backups, begun_on, "copy", *steps)["copy"] == expected
    for index, ranks in enumerate(resumed_on):
        part = steps[index :: len(resumed_on)]
        assert all(list((backups / f"backup{step}").glob("0*")) for step in part)
        for step, result in results(folder, backups, ranks, "resume", *part).items():
            assert result == expected, f"begun on {begun_on} ranks, resumed on {ranks} after step {step}"


@pytest.mark.long
def test_a_resume_at_another_world_size_has_the_bits(folder, tmp_path, expected):
    check_resumes(folder, tmp_path, expected, [7, 23], 2, [3])


@pytest.mark.long
def test_resumes_at_random_steps(folder, tmp_path, expected):
    steps = sorted(random.Random(57).sample(range(1, STEPS), RESUMES))
    check_resumes(folder, tmp_path, expected, steps, 3, [0, 2, 5])


# Faults


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder of tars of which the third is cut after it was indexed."""
    (tmp_path / "corpus").mkdir()
    for shard in range(6):
        samples = [{"npy": npy(row), "cls": str(row % 3).encode()} for row in range(40)]
        write_tar(tmp_path / f"corpus/s{shard}.tar", samples)
    return tmp_path / "corpus"


def npy(row: int) -> bytes:
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
    return header + text.ljust(117) + b"\n" + np.full(4, row % 3, "<f4").tobytes()


def on_ranks(corpus: Path, *options: str, ranks: int = 2):
    arguments = ["--data", str(corpus / "*.tar"), "--target", "cls", "--fast-dev-run", "--device", "cpu"]
    return dptrain(ranks, *arguments, *options, cwd=corpus.parent, DPTRAIN_CACHE=str(corpus.parent / "cache"))


@pytest.mark.long
def test_ranks_train_on_tars_and_end_alike_where_one_is_damaged(corpus):
    done = on_ranks(corpus)
    assert (done.code, done.messages) == (0, [])
    assert "4 shards for training" in done.out
    path = corpus / "s2.tar"
    os.truncate(path, path.stat().st_size // 2)
    done = on_ranks(corpus)
    assert done.code == 65
    (line,) = done.messages
    assert "s2.tar: truncated" in line
    assert "--bad-shards skip" in line
    done = on_ranks(corpus, "--bad-shards", "skip")
    assert done.code == 0
    assert "corpus: 160 + 40 samples" in done.out
    assert "skipped 1 shard: " in done.out


MODEL = """
import dptrain as dp


def build_model(input_shape, num_classes):
    return dp.Sequential(
        [
            dp.layers.Input(input_shape, dtype="int32"),
            dp.layers.Embedding(num_classes, 8),
            dp.layers.Dense(num_classes, activation="softmax"),
        ]
    )
"""


@pytest.mark.long
def test_the_command_line_trains_on_token_shards_with_the_same_bits(tmp_path):
    write_tokens(tmp_path, [401, 90, 203, 77, 150], 50)
    (tmp_path / "models.py").write_text(MODEL)
    environment = {"cwd": tmp_path, "DPTRAIN_CACHE": str(tmp_path / "cache")}
    done = dptrain(2, "index", "t*.bin", **environment)
    assert (done.code, done.err) == (0, "")
    assert "dptrain-index.json: 5 shards, 921 tokens, 1,842 bytes" in done.out
    options = ["--data", "t*.bin", "--sequence-length", "6", "--classes", "50", "--model", "models.py:build_model"]
    options += ["--batch-size", "16", "--reproducible", "--epochs", "2", "--device", "cpu"]
    weights = []
    for ranks in (0, 3):
        done = dptrain(ranks, *options, "--out", f"run{ranks}", **environment)
        assert (done.code, done.messages) == (0, [])
        assert ": 113 + 36 samples; 6 -> models.py:build_model() -> 50" in done.out
        weights.append((tmp_path / f"run{ranks}/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    done = dptrain(0, "--data", "t*.bin", "--classes", "50", "--fast-dev-run", **environment)
    assert done.code == 2
    assert done.messages == ["dptrain: t*.bin: shards of token ids need --sequence-length, the ids of a sample"]


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--data", "no*.tar"], 65, "no*.tar: matches no file; expected files that end in .parquet, .tar, .npy, .bin"),
        (["--sharding", "static"], 2, "--sharding static: not supported for streams of shards"),
        (["--validation-split", "0.1"], 2, "--validation-split and --fold: not supported for streams of shards"),
        (["--target", "weight"], 65, "target = 'weight': samples have "),
    ],
)
def test_what_cannot_be_is_one_line_on_all_ranks(corpus, options, code, expected):
    done = on_ranks(corpus, *options)
    assert done.code == code
    (line,) = done.messages
    assert expected in line
