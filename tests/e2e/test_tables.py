"""What a data scientist with a table types: train, see what was decided, predict; and what is wrong with one."""

import json

import numpy as np
import pandas as pd
import pytest

import dptrain as dp
from tests.launching import dptrain, in_turn, mpirun
from tests.sample import sample

ROWS = 300
COMMON = ("--batch-size", "32", "--hidden", "8")


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """A folder with houses.csv: what they cost, and whether they were sold."""
    rng = np.random.default_rng(4)
    frame = pd.DataFrame(
        {
            "id": np.arange(ROWS),
            "rooms": rng.integers(1, 8, ROWS),
            "area": rng.normal(100, 30, ROWS).round(1),
            "heating": rng.choice(["gas", "oil"], ROWS),
            "street": rng.choice([f"street {n}" for n in range(20)], ROWS),
        }
    )
    frame["price"] = 50_000 * frame.rooms + 1000 * frame.area + 20_000 * (frame.heating == "oil")
    frame["sold"] = np.where(frame.price < frame.price.median(), "yes", "no")
    folder = tmp_path_factory.mktemp("houses")
    frame.to_csv(folder / "houses.csv", index=False)
    frame[:250].to_parquet(folder / "train.parquet")
    frame[250:].to_parquet(folder / "test.parquet")
    return folder


def weights(run):
    return dp.models.load_model(run).get_weights()


@pytest.mark.parametrize("more", sample([[], ["--shard-weights"]], 2))
def test_a_regression_on_one_rank_and_on_two(houses, tmp_path, more):
    runs = []
    for ranks in (0, 2):
        out = tmp_path / f"price-{ranks}"
        options = ("--target", "price", "--drop", "id,sold", "--epochs", "25", "--learning-rate", "0.01")
        done = dptrain(
            ranks, "--data", "houses.csv", *options, *COMMON, *(more if ranks else []), "--out", str(out), cwd=houses
        )
        assert (done.code, done.err) == (0, "")
        assert "4 columns; numbers: rooms, area; one-hot: heating (2); embedded: street (20)" in done.out
        assert "target 'price': regression" in done.out
        assert "60 of 300 samples are held out as the test part" in done.out
        assert "5 -> 8 -> 1" in done.out
        runs.append(out)
    metrics = json.loads((runs[0] / "summary.json").read_text())["metrics"]
    assert metrics["val_mae"] < 25_000  # of prices of 50,000 to 600,000, in their own units
    for weight, two in zip(*map(weights, runs), strict=True):
        np.testing.assert_allclose(weight, two, rtol=1e-4, atol=1e-4 * np.abs(weight).max())


@pytest.mark.long
def test_the_model_takes_the_raw_table(houses):
    options = ("--target", "sold", "--drop", "id,price", "--test-data", "test.parquet", "--epochs", "20")
    done = dptrain(0, "--data", "train.parquet", *options, *COMMON, "--out", "sold", cwd=houses)
    assert (done.code, done.err) == (0, "")
    assert "target 'sold': binary, the probability of 'yes' rather than 'no'" in done.out
    metrics = json.loads((houses / "sold" / "summary.json").read_text())["metrics"]
    evaluated = dptrain(0, "evaluate", "sold", "--json", cwd=houses)
    assert json.loads(evaluated.out)["metrics"]["auc"] == pytest.approx(metrics["val_auc"])
    predicted = dptrain(2, "predict", "sold", "--data", "houses.csv", cwd=houses)
    assert predicted.code == 0, predicted.err
    lines = predicted.out.splitlines()
    assert (lines[0], len(lines)) == ("index,class,p_yes", ROWS + 1)
    model, frame = dp.models.load_model(houses / "sold"), pd.read_csv(houses / "houses.csv")
    predictions = model.predict(frame, verbose=0)[:, 0]
    np.testing.assert_allclose(predictions, [float(line.split(",")[2]) for line in lines[1:]], rtol=1e-5)
    assert model.evaluate(frame[250:], verbose=0, return_dict=True)["accuracy"] == pytest.approx(
        metrics["val_accuracy"]
    )


@pytest.mark.long
def test_each_fold_is_standardised_by_the_others(houses):
    """Runs of a sweep on folds are those of `--fold`, whose statistics are of the rows that it trains on."""
    table = ("--data", "houses.csv", "--target", "price", "--drop", "id,sold,street")
    common = (*COMMON, "--epochs", "2")
    plan = ("--grid", "learning_rate=0.01,0.001", "--seeds", "0", "--folds", "2")
    swept = dptrain(2, "sweep", *table, *common, *plan, "--out", "sweep", cwd=houses)
    assert swept.code == 0, swept.err
    assert "compared by val_mae" in swept.out
    results = [json.loads(line) for line in (houses / "sweep" / "results.jsonl").read_text().splitlines()]
    alone = ("--fold", "2/2", "--learning-rate", "0.01", "--out", "fold")
    done = dptrain(0, *table, *common, *alone, cwd=houses)
    assert (done.code, done.err) == (0, "")
    mae = json.loads((houses / "fold" / "summary.json").read_text())["metrics"]["val_mae"]
    assert any(mae == pytest.approx(number, rel=1e-4) for number in _numbers(results))
    frame = pd.read_csv(houses / "houses.csv")
    model = dp.models.load_model(houses / "fold")
    mean = next(
        layer for layer in model._flatten_layers() if isinstance(layer, dp.layers.Normalization)
    ).adapt_mean.numpy()
    assert mean[0] != pytest.approx(frame.rooms.mean(), rel=1e-6)  # half of four fifths of the rows
    assert mean[2:].tolist() == [0, 0]


def _numbers(tree):
    if isinstance(tree, dict | list):
        return [number for inner in (tree.values() if isinstance(tree, dict) else tree) for number in _numbers(inner)]
    return [tree] if isinstance(tree, float) else []


FAULTS = {
    "missing": (None, ["--target", "y"], 65, "data: t.csv not found"),
    "no target": ("a,y\n1,2\n", [], 2, "t.csv: which column is to be predicted? --target NAME, one of a, y"),
    "ragged": (
        "a,y\n1,2\n3\n",
        ["--target", "y"],
        65,
        "t.csv, row 3: 1 field, the header has 2; is there a missing or extra",
    ),
    "text": ("a,y\n1,2\nx,3\n2,5\n", ["--target", "y"], 65, "t.csv, row 3, column 'a': 'x', text among numbers"),
    "no value": ("a,y\n1,2\n,3\n4,5\n", ["--target", "y"], 65, "row 3, column 'a': no value (1 in all); fill it in"),
    "static": (
        "a,y\n1,2.5\n3,4\n",
        ["--target", "y", "--sharding", "static"],
        2,
        "--sharding static: not supported for tables and pictures",
    ),
    "loss": ("a,y\n1,2.5\n3,4\n", ["--target", "y", "--loss", "masked"], 2, "unknown loss 'masked'"),
    "task": ("a,y\n1,2\n", ["--target", "y", "--loss", "mae", "--task", "binary"], 2, "mae is for regression"),
    "no table": ("a,y\n1,2\n", ["--data", "strokes", "--target", "y"], 2, "--target: strokes is not a table"),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    cases = {}
    for name, (content, arguments, _, _) in FAULTS.items():
        (folder / name).mkdir()
        if content is not None:
            (folder / name / "t.csv").write_text(content)
        cases[name] = ["-m", "dptrain", "--data", str(folder / name / "t.csv"), *arguments, "--fast-dev-run"]
    return in_turn(0, cases, folder / "said")


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_says_what_is_wrong(faults, name):
    done, (_, _, code, message) = faults[name], FAULTS[name]
    assert (done.code, len(done.messages)) == (code, 1)
    assert message.removeprefix("data: ") in done.messages[0]
    assert "Traceback" not in done.err


def test_one_line_says_it_on_two_ranks(tmp_path):
    content, arguments, code, message = FAULTS["no target"]
    (tmp_path / "t.csv").write_text(content)
    done = dptrain(2, "--data", "t.csv", *arguments, "--fast-dev-run", cwd=tmp_path)
    assert (done.code, len(done.messages)) == (code, 1)
    assert message in done.messages[0]


@pytest.mark.parametrize(("other", "code"), sample([(0, 65), (1, 0)], 2))
def test_a_node_reads_a_table_once(tmp_path, other, code):
    """A table that one rank sees otherwise ends the job where that rank is to read it, and is not read elsewhere."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        rows = "".join(f"{n % 7},{2 * n}.5\n" for n in range(20))
        (tmp_path / str(rank) / "t.csv").write_text(f"a,y\n{rows}{'x,1' if rank == other else ''}\n")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nos.chdir(os.path.join({str(tmp_path)!r}, os.environ['PMI_RANK']))\n"
        "from dptrain.cli.main import main\n"
        "sys.exit(main(['--data', 't.csv', '--target', 'y', '--fast-dev-run', '--out', 'o']))\n"
    )
    done = mpirun(2, str(script))
    assert done.code == code, done.err
    assert len(done.messages) == (code != 0)
    if code:
        assert "t.csv, row 22, column 'a': 'x', text among numbers" in done.messages[0]


UNSEEN = {
    "rooms,heating\n3,coal\n": "row 2, column 'heating': category 'coal', which training has not seen",
    "rooms\n3\n": ": no column 'heating'",
    "rooms,heating\n3,gas\nmany,gas\n": "row 3, column 'rooms': 'many' among numbers",
    "rooms,heating\n3,gas\n,gas\n": "row 3, column 'rooms': no value (1 in all); fill it in",
}


@pytest.mark.long
def test_prediction_goes_on_with_what_training_has_not_seen_where_asked(houses):
    options = ("--target", "price", "--columns", "rooms,heating", "--epochs", "1", *COMMON, "--out", "unseen")
    (houses / "coal.csv").write_text("rooms,heating\n3,coal\n3,gas\n")
    cases = {
        "run": ["-m", "dptrain", "--data", "houses.csv", *options],
        "other": ["-m", "dptrain", "predict", "unseen", "--data", "coal.csv", "--unseen", "other"],
        "no table": ["-m", "dptrain", "predict", "unseen", "--data", "coal.csv", "--bad-pictures", "skip"],
    }
    said = in_turn(0, cases, houses / "said-unseen", cwd=houses)
    assert said["run"].code == 0
    first, second = (float(line.split(",")[1]) for line in said["other"].out.splitlines()[1:])
    assert first != second
    assert "--bad-pictures skip: the model was trained on a table; leave it out" in said["no table"].messages[0]


def test_prediction_refuses_what_training_has_not_seen(houses):
    """A run, and one table after the other."""
    options = ("--target", "price", "--columns", "rooms,heating", "--epochs", "1")
    cases = {"run": ["-m", "dptrain", "--data", "houses.csv", *options, *COMMON, "--out", "heated"]}
    for number, text in enumerate(UNSEEN):
        (houses / f"{number}.csv").write_text(text)
        cases[text] = ["-m", "dptrain", "predict", "heated", "--data", f"{number}.csv"]
    said = in_turn(0, cases, houses / "said", cwd=houses)
    assert said["run"].code == 0
    for text, message in UNSEEN.items():
        assert (said[text].code, len(said[text].messages)) == (65, 1)
        assert message in said[text].messages[0]
