"""What a data scientist with a folder of pictures types."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import dptrain as dp
from tests.launching import dptrain, in_turn
from tests.sample import sample

# Batches that two ranks do not share evenly.
COMMON = ("--batch-size", "15", "--hidden", "8", "--learning-rate", "0.01")
SWEPT = ("sweep", "--grid", "learning_rate=0.01,0.1", "--seeds", "0-1", "--epochs", "2")


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A folder with 60 noisy pictures: bright ones, dark ones, and bright ones on the left."""
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("pictures")
    for label, name in enumerate(("bright", "dark", "half")):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(20):
            image = rng.integers(0, 60, (6, 8, 3)) + (150 if label != 1 else 0)
            image[:, 4:] -= 150 if label == 2 else 0
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / "pets" / name / f"{number}.png")
    return folder


def test_training_and_prediction(pets):
    runs = {}
    for ranks in (0, 2):
        out = pets / f"run-{ranks}"
        data = "pets" if ranks else "images:pets"
        done = dptrain(ranks, "--data", data, "--epochs", "15", *COMMON, "--out", str(out), cwd=pets)
        assert (done.code, done.err) == (0, "")
        assert "60 pictures, 6x8 RGB; 3 classes: bright, dark, half" in done.out
        assert "pets: 48 + 12 samples; 6x8x3 -> 8 -> 3" in done.out
        runs[ranks] = out
    assert json.loads((runs[0] / "summary.json").read_text())["metrics"]["val_accuracy"] == 1
    alone, two = (dp.models.load_model(run).get_weights() for run in runs.values())
    for left, right in zip(alone, two, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)
    done = dptrain(2, "predict", str(runs[0]), "--data", "images:pets/dark", cwd=pets)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "index,file,class,p_bright,p_dark,p_half"
    assert {line.split(",")[2] for line in lines[1:]} == {"dark"}
    assert {line.split(",")[1] for line in lines[1:]} == {f"{number}.png" for number in range(20)}


@pytest.fixture(scope="module")
def alone(pets):
    """What one rank trains that keeps all pictures."""
    cases = {
        "whole": ["--validation-split", "0.25", "--epochs", "4", "--out", "whole"],
        "begun": ["--validation-split", "0.25", "--epochs", "2", "--out", "begun"],
        "sweep": [*SWEPT, "--out", "sweep"],
    }
    said = in_turn(0, {name: command(*case) for name, case in cases.items()}, pets / "said-alone", cwd=pets)
    assert {name: (done.code, done.err) for name, done in said.items()} == dict.fromkeys(cases, (0, ""))
    return pets


def command(*options):
    first = options[:1] if options[0] == "sweep" else ()
    return ["-m", "dptrain", *first, "--data", "pets", *COMMON, *options[len(first) :]]


def results(folder):
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return sorted((row["trial"], row["seed"], row["epoch"], row["loss"], row["val_loss"]) for row in lines)


# No picture stays in memory; some do.
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "most"), sample([(0, 1), (2, 3000)], 2))
def test_pictures_that_are_decoded_again_give_the_same_numbers(alone, ranks, most):
    suffix = f"{ranks}-{most}"
    trained = ["--validation-split", "0.25", "--epochs", "4", "--out"]
    cases = {
        "whole": [*trained, f"whole-{suffix}"],
        "resumed": [*trained, f"resumed-{suffix}", "--resume", "begun"],
        "sweep": [*SWEPT, "--out", f"sweep-{suffix}"],
    }
    cases = {name: [*command(*arguments), "--data.max_bytes", str(most)] for name, arguments in cases.items()}
    said = in_turn(ranks, cases, alone / f"said-{suffix}", cwd=alone)
    assert {name: (done.code, done.err) for name, done in said.items()} == dict.fromkeys(cases, (0, ""))
    for name in cases:
        if name == "sweep":
            together, expected = (results(alone / folder) for folder in (f"sweep-{suffix}", "sweep"))
            assert together == expected
            continue
        together, expected = (
            dp.models.load_model(alone / folder).get_weights() for folder in (f"{name}-{suffix}", "whole")
        )
        for left, right in zip(together, expected, strict=True):
            if ranks == 0:
                np.testing.assert_array_equal(left, right)
            else:
                np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)


def test_what_is_wrong_with_pictures_is_one_line(pets, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "odd" / name).mkdir(parents=True)
        for number, side in enumerate((4, 4, 6)):
            Image.new("L", (side, side)).save(tmp_path / "odd" / name / f"{number}.png")
    (tmp_path / "odd" / "dog" / "a.txt").write_text("x")
    (tmp_path / "linked").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "odd" / name)
    start = ["-m", "dptrain", "--data", "odd", "--fast-dev-run", "--data.test_split", "0.5"]
    cases = {
        "text": start,
        "sizes": [*start, "--bad-pictures", "skip"],
        "good": [*start, "--bad-pictures", "skip", "--image-size", "5x5"],
        "size": [*start, "--image-size", "5"],
        "no pictures": ["-m", "dptrain", "--image-size", "5x5"],
        "no folder": ["-m", "dptrain", "--data", "images:odd/cat"],
        "missing": ["-m", "dptrain", "--data", "petz", "--image-size", "5x5"],
        "missing pictures": ["-m", "dptrain", "--data", "images:petz"],
        "link": ["-m", "dptrain", "--data", "images:linked", "--bad-pictures", "skip"],
    }
    said = in_turn(0, cases, tmp_path / "said", cwd=tmp_path)
    expected = {
        "text": (65, "odd/dog/a.txt: not a picture; expected PNG"),
        "sizes": (65, "pictures of 2 sizes (height x width): 4x4 (4), 6x6 (2); --image-size 4x4 resizes them"),
        "size": (2, "data.image_size = '5', set on the command line: '5': expected height and width, such as 32x32"),
        "no folder": (65, "odd/cat: not a folder with one folder of pictures per class"),
        "missing": (65, "data: petz not found; expected a folder with one folder of pictures per class"),
        "missing pictures": (65, "data: petz not found; expected a folder with one folder of pictures per class"),
        "link": (65, "linked/cat: a link that leads out of linked; put the pictures there, or --follow-links"),
        "no pictures": (2, "--image-size: strokes is not a folder with one folder of pictures per class"),
    }
    for name, (code, message) in expected.items():
        assert (said[name].code, len(said[name].messages)) == (code, 1)
        assert message in said[name].messages[0]
    assert said["good"].code == 0
    assert "skipped: odd/dog/a.txt: not a picture" in said["good"].out
    assert "5x5x1 -> 128 -> 2" in said["good"].out
    done = dptrain(2, *start[2:], cwd=tmp_path)
    assert (done.code, len(done.messages)) == (65, 1)


@pytest.mark.parametrize("command", [[], ["sweep", "--seeds", "0-1"]], ids=["train", "sweep"])
def test_a_picture_that_is_cut_ends_all_ranks(pets, tmp_path, command):
    shutil.copytree(pets / "pets", tmp_path / "pets")
    path = tmp_path / "pets" / "dark" / "7.png"
    path.write_bytes(path.read_bytes()[:-40])
    done = dptrain(2, *command, "--data", "pets", *COMMON, cwd=tmp_path)
    assert done.code == 65
    (line,) = done.messages
    assert "pets/dark/7.png: damaged" in line
