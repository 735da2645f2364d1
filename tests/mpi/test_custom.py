"""Steps of a user's own: N ranks train what one rank trains, those that have no samples included.

Rows mixed with others, batch normalization, in two models, sample weights, penalties and metrics with a state are in
it.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun
from tests.sample import sample, taken

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "custom.py")
LOGS = ["loss", "mae", "mse", "noise", "batches", "loudest"]
SIZES = {"uneven last batch": (41, 16), "fewer samples than ranks": (3, 8), "an empty last part": (17, 4)}


@pytest.fixture(scope="module")
def train(once):
    """Return a function that returns what a case trains on N ranks (0: without mpirun); all are trained in turn."""

    def train_all(ranks: int, folder: Path) -> tuple[dict[str, Finished], Path]:
        cases = {
            name: [SCRIPT, str(folder / f"{name}.npz"), *map(str, sizes)] for name, sizes in taken(SIZES.items(), 3)
        }
        return in_turn(ranks, cases, folder / "in turn"), folder

    def train(ranks: int, case: str) -> dict[str, np.ndarray]:
        done, folder = once(f"custom on {ranks}", functools.partial(train_all, ranks))
        assert (done[case].code, done[case].err) == (0, "")
        with np.load(folder / f"{case}.npz") as saved:
            return dict(saved)

    return train


@pytest.mark.long
@pytest.mark.parametrize("case", sample(SIZES, 3))
def test_float64_agrees_to_1e_12(train, case):
    kept = alone, together = train(0, case), train(4, case)
    for name in alone:
        if name == "history":
            a, b = (json.loads(str(results[name])) for results in kept)
            assert list(a) == list(b) == [*LOGS, "val_loss", "val_mae", "val_mse"]
            for key in a:
                np.testing.assert_allclose(b[key], a[key], rtol=1e-12, err_msg=key)
        else:
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-12, atol=1e-13, err_msg=name)


WRONG = """
import numpy as np, dptrain as dp
class Wrong(dp.Sequential):
    def train_step(self, data):
        if dp.rank() == 1:
            raise dp.errors.ConfigError("not like this")
        return {"loss": dp.ops.mean(self(data))}
model = Wrong([dp.layers.Dense(3, input_shape=(3,))])
model.compile("sgd")
model.fit(np.zeros((8, 3)), verbose=0)
"""


def test_an_error_in_one_ranks_step_ends_the_job():
    done = mpirun(2, "-c", WRONG)
    assert done.code == 2
    (message,) = done.messages
    assert "not like this (rank 1, host " in message
