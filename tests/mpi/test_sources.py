"""N ranks train on a script's own batches as one does, and end together where one rank's batches are others."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun
from tests.sample import sample, taken

SCRIPT = str(ROOT / "tests/mpi/scripts/sources.py")


KINDS = ("generator", "dataset", "shards", "parts", "workers")


@pytest.fixture(scope="module")
def train(once):
    """Return a function that returns what N ranks (0: no mpirun) train on a kind of source; on all kinds in turn."""

    def train_all(ranks: int, folder: Path) -> tuple[dict[str, Finished], Path]:
        kinds = KINDS if ranks else ("generator", "dataset", "shards")
        cases = {source: [SCRIPT, source, "none", "-1", str(folder / f"{source}.npz")] for source in kinds}
        return in_turn(ranks, cases, folder / "in turn"), folder

    def train(ranks: int, kind: str) -> dict[str, np.ndarray]:
        done, folder = once(f"sources on {ranks}", functools.partial(train_all, ranks))
        assert (done[kind].code, done[kind].err) == (0, "")
        with np.load(folder / f"{kind}.npz") as saved:
            return dict(saved)

    return train


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_one_rank(train, kind):
    together, expected = train(3, kind), train(0, "dataset" if kind in ("parts", "workers") else kind)
    assert expected["prediction"].shape == (59, 2)
    for name, values in expected.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-11, atol=1e-13, err_msg=name)


TROUBLES = [
    ("generator", "ends", 65, "batch 2 of epoch 2: the ranks have drawn different batches: "),
    ("generator", "size", 65, "batch 1 of epoch 2: the ranks have drawn different batches: "),
    ("generator", "dtype", 65, "batch 1 of epoch 2: the ranks have drawn different batches: "),
    ("generator", "values", 65, "float64 (2,), with other values; every rank needs the same data: seed"),
    ("generator", "shape", 65, "batch 1 of epoch 2: model expects 4 features of shape (4,), data has 3"),
    ("generator", "raises", 70, "batch 1 of epoch 2: KeyError: 'the disk is gone' (sources.py:"),
    ("generator", "exits", 70, "batch 1 of epoch 2: SystemExit: 3"),
    ("dataset", "length", 2, "the ranks call fit differently: "),
    ("parts", "raises", 70, "KeyError: 'the disk is gone' ("),
    ("parts", "dtype", 65, "the ranks have drawn different batches: "),
    ("workers", "raises", 70, "KeyError: 'the disk is gone' ("),
]


BAD = taken([0, 1], 2, first=1)


@pytest.fixture(scope="module")
def troubled(once) -> dict[str, Finished]:
    """How ranks end of which one has other batches, three for generators, else two; each in turn."""

    def launch(folder: Path) -> dict[str, Finished]:
        done: dict[str, Finished] = {}
        for ranks in (3, 2):
            cases = {
                f"{kind} {trouble} {bad}": [SCRIPT, kind, trouble, str(bad), str(folder / "out.npz")]
                for kind, trouble, *_ in TROUBLES
                for bad in BAD
                if ranks == (3 if kind == "generator" else 2)
            }
            done |= in_turn(ranks, cases, folder / f"on {ranks}")
        return done

    return once("troubled sources", launch)


@pytest.mark.parametrize("bad", sample([0, 1], 2, first=1))
@pytest.mark.parametrize(("kind", "trouble", "code", "message"), TROUBLES)
def test_a_rank_with_other_batches_ends_all(troubled, kind, trouble, code, message, bad):
    done = troubled[f"{kind} {trouble} {bad}"]
    assert done.code == code, done.err
    assert done.err.count("dptrain.errors.AgreedError: ") == 1, "rank 0 speaks for all"
    assert message in done.err
    named = {"ends": "has no further batch, the others ", "size": "has 1 samples, float64"}
    assert f"rank {bad}" in done.err or trouble == "length"
    assert named.get(trouble, "") in done.err
    if trouble == "values":
        assert f"different batches: rank {bad} (host " in done.err, "the majority is right"
    if "different" not in message and trouble not in ("length", "values"):
        assert f"(rank {bad}, host " in done.err


def test_a_nan_in_a_batch_is_named_with_its_rank_and_place(tmp_path):
    done = mpirun(3, SCRIPT, "generator", "nan", "-1", str(tmp_path / "out.npz"))
    expected = (
        "dptrain: training diverged in step 4 of epoch 1: x is not finite in sample 11 of its batch (rank 2, host "
    )
    assert done.code == 76, done.err
    assert expected in done.err
