"""Texts on the command line: a column of a table and a folder, LSTMs and transformers, alone and on two ranks."""

import json

import numpy as np
import pandas as pd
import pytest

import dptrain as dp
from tests.launching import dptrain

pytestmark = pytest.mark.long
ROWS = 96
COMMON = ("--batch-size", "16", "--hidden", "8", "--learning-rate", "0.01", "--text-length", "6")


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A folder with reviews.csv, and the same texts in a folder a class."""
    folder, rng = tmp_path_factory.mktemp("reviews"), np.random.default_rng(2)
    kinds = {"good": ["great", "lovely", "superb"], "bad": ["dull", "awful", "boring"]}
    rows = []
    for number in range(ROWS):
        label = ("good", "bad")[number % 2]
        words = [*rng.choice(["the", "film", "story", "end"], 1 + number % 4), *rng.choice(kinds[label], 2)]
        rows.append((" ".join(rng.permutation(words)), round(float(rng.normal()), 3), label))
        (folder / "texts" / label).mkdir(parents=True, exist_ok=True)
        (folder / "texts" / label / f"{number}.txt").write_text(rows[-1][0])
    pd.DataFrame(rows, columns=["review", "stars", "label"]).to_csv(folder / "reviews.csv", index=False)
    return folder


@pytest.mark.parametrize("network", ["lstm", "transformer"])
def test_a_column_on_one_rank_and_on_two(reviews, network):
    options = ("--data", "reviews.csv", "--target", "label", "--text", "review", "--network", network, "--epochs", "8")
    losses = []
    for ranks in (0, 2):
        out = f"{network}-{ranks}"
        done = dptrain(ranks, *options, *COMMON, "--out", out, cwd=reviews)
        assert (done.code, done.err) == (0, "")
        assert f"7 -> {network} -> 8 -> 1" in done.out
        losses.append(json.loads((reviews / out / "summary.json").read_text())["metrics"])
    assert losses[0]["val_accuracy"] > 0.8
    assert losses[1]["val_loss"] == pytest.approx(losses[0]["val_loss"], rel=1e-4)
    predicted = dptrain(0, "predict", f"{network}-0", "--data", "reviews.csv", cwd=reviews)
    lines = predicted.out.splitlines()
    assert (lines[0], len(lines)) == ("index,class,p_good", ROWS + 1)
    model = dp.models.load_model(reviews / f"{network}-2")
    predictions = model.predict(pd.read_csv(reviews / "reviews.csv"), verbose=0)[:, 0]
    np.testing.assert_allclose(predictions, [float(line.split(",")[2]) for line in lines[1:]], rtol=1e-3, atol=1e-4)
    evaluated = dptrain(2, "evaluate", f"{network}-0", "--json", cwd=reviews)
    metrics = json.loads(evaluated.out)["metrics"]
    assert metrics["loss"] == pytest.approx(losses[0]["val_loss"], rel=1e-4)


def test_a_folder_a_sweep_and_a_resume(reviews):
    options = ("--data", "texts", "--network", "dense", *COMMON)
    swept = dptrain(
        0, "sweep", *options, "--grid", "learning_rate=0.01,0.03", "--seeds", "0", "--epochs", "2", cwd=reviews
    )
    assert swept.code == 0, swept.err
    whole = dptrain(0, *options, "--epochs", "4", "--out", "whole", cwd=reviews)
    assert "96 texts; 2 classes: bad, good" in whole.out
    dptrain(0, *options, "--epochs", "2", "--out", "parts", cwd=reviews)
    resumed = dptrain(0, *options, "--epochs", "4", "--out", "resumed", "--resume", "parts", cwd=reviews)
    assert resumed.code == 0, resumed.err
    results = [json.loads((reviews / out / "summary.json").read_text())["metrics"] for out in ("whole", "resumed")]
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-6)
    predicted = dptrain(0, "predict", "whole", "--data", "texts/good", cwd=reviews)
    assert predicted.out.splitlines()[0] == "index,file,class,p_bad,p_good"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_fault_is_one_line_on_every_rank(reviews, ranks):
    (reviews / "latin.csv").write_bytes(b"review,label\nfine,a\nbad \xff,b\n")
    (reviews / "empty.csv").write_bytes(b"")
    (reviews / "silent.csv").write_bytes(b"review,label\n...,a\n!,b\n")
    for name, message in (
        ("latin", "byte ff is not UTF-8"),
        ("empty", "empty; expected a header"),
        ("silent", "no words"),
    ):
        done = dptrain(ranks, "--data", f"{name}.csv", "--target", "label", "--text", "review", cwd=reviews)
        assert done.code == 65
        assert message in done.err
        assert len(done.err.strip().splitlines()) == 1
    done = dptrain(
        ranks, "--data", "reviews.csv", "--target", "label", "--network", "lstm", "--drop", "review", cwd=reviews
    )
    assert (done.code, "no column of text" in done.err) == (2, True)
