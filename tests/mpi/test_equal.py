"""N ranks train what one rank trains."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/train.py")


def sgd(**options) -> dict:
    return {"class_name": "SGD", "config": {"learning_rate": 0.5, **options}}


# Paths that end in "/bias" follow ScheduleFreeAdamW, the others RMSprop.
SEVERAL = {
    "class_name": "MultiOptimizer",
    "config": {
        "optimizer_map": {
            "class_name": "OptimizerMap",
            "config": {
                "default_optimizer": {"class_name": "RMSprop", "config": {}},
                "optimizer_map": {".*/bias": {"class_name": "ScheduleFreeAdamW", "config": {}}},
            },
        }
    },
}
CASES = {
    "uneven last batch": {},
    "drop last": {"drop_last": True},
    "fewer samples than ranks": {"samples": 3, "batch_size": 8, "epochs": 5},
    "batch as small as the ranks": {"samples": 41, "batch_size": 8},
    "dropout": {"dropout": 0.3},
    "several optimizers": {"optimizer": SEVERAL},
    "sgd": {"optimizer": "sgd"},
    "clipped norms": {"optimizer": sgd(clipnorm=0.05, momentum=0.9, nesterov=True)},
    "accumulated gradients": {"optimizer": sgd(global_clipnorm=0.05, gradient_accumulation_steps=3, weight_decay=0.01)},
    "batch normalization": {"batch_normalization": True},
    "batch normalization, ranks without samples": {
        **{"batch_normalization": True, "samples": 9, "batch_size": 8, "epochs": 3, "optimizer": "sgd"},
    },
    "gradients in bfloat16": {"batch_normalization": True, "comm_dtype": "bfloat16"},
    "gradients in float16, ranks without samples": {
        **{"comm_dtype": "float16", "samples": 9, "batch_size": 8, "epochs": 3, "optimizer": "sgd"},
    },
    "a layer frozen after compile": {"frozen": True},
    "lora": {"lora": True},
    "nothing to train": {"trainable": False, "epochs": 1},
    "regularizers": {"regularizer": {"class_name": "L1L2", "config": {"l1": 0.003, "l2": 0.02}}},
    "constraints": {"constraint": {"class_name": "MaxNorm", "config": {"max_value": 0.9}}},
}


# In the other cases 3 ranks, whose parts of a batch differ, stand for all.
RANKS = {
    "uneven last batch": (1, 2, 3, 4),
    "fewer samples than ranks": (2, 4),
    "batch as small as the ranks": (4,),
    "batch normalization": (2, 3),
    "lora": (2, 3),
}
ROUNDED = {"gradients in bfloat16": (2, 3), "gradients in float16, ranks without samples": (3,)}
IN_FLOAT64 = [(case, ranks) for case in CASES if case not in ROUNDED for ranks in RANKS.get(case, (3,))]
IN_ROUNDED = [(case, ranks) for case in ROUNDED for ranks in ROUNDED[case]]
IN_HALVES = [("batch normalization", ranks, dtype) for ranks, dtype in ((2, "mixed_bfloat16"), (3, "mixed_float16"))]
IN_FLOAT32 = [("uneven last batch", 2), ("dropout", 4)]
# What every run trains, on 3 ranks.
OFTEN = {"uneven last batch", "batch normalization"}


def often_or_long(cases):
    return [
        case if case[0] in OFTEN and case[1] == 3 else pytest.param(*case, marks=pytest.mark.long) for case in cases
    ]


@pytest.fixture(scope="module")
def few_npz(tmp_path_factory) -> Path:
    """A data set of 403 + 101 strokes, whose sizes no number of ranks divides."""
    from dptrain.data.strokes import generate

    path = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(path, **dict(zip(("x_train", "y_train", "x_test", "y_test"), generate(403, 101), strict=True)))
    return path


@pytest.fixture(scope="module")
def train(request, few_npz, once):
    """Return a function that trains on N ranks (0: without mpirun) and returns what was saved.

    The first call with a number of ranks trains all that tests of this run want of as many.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = [IN_FLOAT32[0] + ("float32",)]  # of the test of the same bits as well
    for params in (item.callspec.params for item in tests if hasattr(item, "callspec")):
        wanted.append((params["case"], params["ranks"], params["dtype"]))
    wanted = list(dict.fromkeys(wanted))

    def train_all(ranks: int, folder: Path) -> tuple[dict[str, Finished], Path]:
        cases = {}
        for name, on, kind in wanted:
            if ranks in (0, on):
                out, options = folder / f"{name}, {kind}.npz", CASES[name] | {"dtype": kind}
                cases[f"{name}, {kind}"] = [SCRIPT, str(few_npz), str(out), json.dumps(options)]
        return in_turn(ranks, cases, folder / "in turn", seeds=True), folder

    def train(ranks: int, case: str, dtype: str) -> dict[str, np.ndarray]:
        all_done, folder = once(f"equal on {ranks}", functools.partial(train_all, ranks))
        done = all_done[f"{case}, {dtype}"]
        assert (done.code, done.err) == (0, "")
        with np.load(folder / f"{case}, {dtype}.npz") as saved:
            return dict(saved)

    return train


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize(("case", "ranks"), often_or_long(IN_FLOAT64))
def test_float64_agrees_to_1e_12(train, case, ranks, dtype):
    alone, together = train(0, case, dtype), train(ranks, case, dtype)
    for name in alone:
        if name == "history":
            a, b = (json.loads(str(results[name])) for results in (alone, together))
            assert list(a) == ["loss", "accuracy", "val_loss", "val_accuracy"]
            for key in a:
                np.testing.assert_allclose(b[key], a[key], rtol=1e-12, err_msg=key)
        else:
            scale = np.abs(alone[name]).max()
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-12, atol=1e-12 * scale, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize(("case", "ranks"), sample(IN_FLOAT32, 2))
def test_float32_agrees_to_1e_5_after_three_epochs(train, case, ranks, dtype):
    alone, together = train(0, case, dtype), train(ranks, case, dtype)
    for name in ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"):
        difference = np.linalg.norm(together[name] - alone[name]) / np.linalg.norm(alone[name])
        assert difference < 1e-5, name


@pytest.mark.parametrize(("case", "ranks", "dtype"), often_or_long(IN_HALVES))
def test_half_precision_agrees_but_for_what_falls_between_two_numbers(train, case, ranks, dtype):
    """Sums of ranks differ in float32's last bits, so now and then one is rounded to the next number."""
    alone, together = train(0, case, dtype), train(ranks, case, dtype)
    for name in ("dense/kernel", "dense_1/kernel", "dense_1/bias"):
        difference = np.linalg.norm(together[name] - alone[name]) / np.linalg.norm(alone[name])
        assert difference < 0.01, name
    losses = [json.loads(str(results["history"]))["loss"] for results in (alone, together)]
    np.testing.assert_allclose(*losses, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize(("case", "ranks"), sample(IN_ROUNDED, 3, first=1))
def test_gradients_in_half_precision_agree_to_their_rounding(train, case, ranks, dtype):
    """The script compares the ranks, whose weights and predictions have the same bits."""
    alone, together = train(0, case, dtype), train(ranks, case, dtype)
    for name in ("dense/kernel", "dense_1/kernel", "dense_1/bias"):
        difference = np.linalg.norm(together[name] - alone[name]) / np.linalg.norm(alone[name])
        assert 0 < difference < 0.02, name
    losses = [json.loads(str(results["history"]))["loss"] for results in (alone, together)]
    np.testing.assert_allclose(*losses, rtol=5e-3)


def test_the_same_bits_on_every_run(train, few_npz, tmp_path):
    first = train(2, "uneven last batch", "float32")
    out = tmp_path / "again.npz"
    done = mpirun(2, SCRIPT, str(few_npz), str(out), json.dumps({"dtype": "float32"}))
    assert done.code == 0
    with np.load(out) as again:
        assert all(again[name].tobytes() == first[name].tobytes() for name in first)
