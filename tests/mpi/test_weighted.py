"""Ranks train with sample weights, and with samples that are ignored, what one rank trains."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn
from tests.sample import sample, taken

SCRIPT = str(ROOT / "tests/mpi/scripts/weighted.py")
SPARSE, DENSE = "SparseCategoricalCrossentropy", "CategoricalCrossentropy"
CASES = {
    "weights": (SPARSE, {}, True),
    "a class ignored": (SPARSE, {"ignore_class": 2}, False),
    "weights and a class ignored": (SPARSE, {"ignore_class": 2}, True),
    "mean of weights and a class ignored": (SPARSE, {"ignore_class": 2, "reduction": "mean_with_sample_weight"}, True),
    "sum": (DENSE, {"reduction": "sum"}, True),
    "mean of weights": (DENSE, {"reduction": "mean_with_sample_weight", "label_smoothing": 0.1}, True),
    "weights of steps": (SPARSE, {}, True, 5),
}


@pytest.fixture(scope="module")
def train(once):
    """Return a function that returns what a case trains on N ranks (0: without mpirun); all are trained in turn."""

    def train_all(ranks: int, folder: Path) -> tuple[dict[str, Finished], Path]:
        cases = {}
        for number, (name, config, weighted, *steps) in taken(CASES.items(), 4, 2):
            options = {"loss": {"class_name": name, "config": config}, "weighted": weighted, "steps": steps}
            cases[number] = [SCRIPT, str(folder / f"{number}.npz"), json.dumps(options)]
        return in_turn(ranks, cases, folder / "in turn"), folder

    def train(ranks: int, case: str) -> dict[str, np.ndarray]:
        done, folder = once(f"weighted on {ranks}", functools.partial(train_all, ranks))
        assert (done[case].code, done[case].err) == (0, "")
        with np.load(folder / f"{case}.npz") as saved:
            return dict(saved)

    return train


@pytest.mark.parametrize("case", sample(CASES, 4, 2))
def test_float64_agrees_to_1e_12(train, case):
    alone, together = train(0, case), train(3, case)
    assert together["keys"].tolist() == alone["keys"].tolist()
    assert len(alone["keys"]) == 2 * (3 if CASES[case][0] == SPARSE else 9)
    # Metrics that are means compute in float32, as Keras'.
    exact = [key.endswith("loss") for key in alone["keys"]]
    np.testing.assert_allclose(together["logs"][:, exact], alone["logs"][:, exact], rtol=1e-12)
    np.testing.assert_allclose(together["logs"], alone["logs"], rtol=1e-6)
    np.testing.assert_allclose(together["scores"], alone["scores"], rtol=1e-6)
    np.testing.assert_allclose(together["scores"][:, 0], alone["scores"][:, 0], rtol=1e-12)
    np.testing.assert_allclose(together["params"], alone["params"], rtol=1e-12, atol=1e-12)
    assert alone["logs"][-1, 0] < alone["logs"][0, 0], "it learns"
