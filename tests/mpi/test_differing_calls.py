"""Ranks that call different methods end together, with a line that says which ranks call what."""

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, mpirun

SCRIPT = str(ROOT / "tests/mpi/scripts/differ.py")


def differ(ranks: int, tmp_path, *arguments: object) -> Finished:
    return mpirun(ranks, SCRIPT, *map(str, arguments), timeout=30, TMPDIR=str(tmp_path))


@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (2, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize(
    ("own", "others", "more"),
    [
        ("fit", "evaluate", []),
        ("predict", "fit", []),
        ("predict", "fit", ["later"]),
    ],
)
def test_methods(tmp_path, own, others, more, ranks, odd):
    done = differ(ranks, tmp_path, own, others, odd, *more)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    rest = [str(rank) for rank in range(ranks) if rank != odd]
    assert "the ranks call different methods: " in line
    assert f"rank {odd} in {own}" in line
    assert f"rank{'s' * (ranks == 3)} {', '.join(rest)} in {others}" in line
    assert "KeyError" not in done.err


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("own", "others", "message"),
    [
        ("save", "fit", "in saving"),
        ("barrier", "fit", "in fit"),
        ("barrier", "agree", "in barrier"),
        ("broadcast", "barrier", "in broadcast"),
        ("agree", "broadcast", "in agree('lunch')"),
    ],
)
def test_collectives_in_user_code(tmp_path, own, others, message, odd):
    done = differ(2, tmp_path, own, others, odd)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    assert "the ranks call different methods: " in line
    assert message in line


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("own", "others", "name", "values"),
    [
        ("fit in bfloat16", "fit", "dtype", ("'mixed_bfloat16'", "'float32'")),
        ("train_on_batch in float16", "train_on_batch", "dtype", ("'mixed_float16'", "'float32'")),
        ("evaluate a layer in float16", "evaluate", "dtype", ("'float32, dense in float16'", "'float32'")),
        ("fit with a bucket", "fit", "comm, bucket_mb and comm_dtype", ("['host', 1, None]", "['host', 25.0, None]")),
    ],
)
def test_what_a_model_computes_in_is_compared_before_the_first_step(tmp_path, own, others, name, values, odd):
    done = differ(3, tmp_path, own, others, odd)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if "AgreedError: " in line)
    shown = ", ".join(f"rank {rank} has {values[rank != odd]}" for rank in range(3))
    assert f"AgreedError: the ranks have compiled the model differently: {name}: {shown}" in line
