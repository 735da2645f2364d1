"""N ranks train on a folder of pictures as one does, each decoding its own; and end together at a bad file."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.launching import in_turn

SCRIPT = str(ROOT / "tests/mpi/scripts/pictures.py")


def draw(folder):
    """Write folders of pictures, some of which are damaged."""
    rng = np.random.default_rng(5)
    for label, name in enumerate(("bright", "dark", "half")):
        (folder / "good" / name).mkdir(parents=True)
        for number in range(9 + label):
            size = (6, 8, 3) if number % 2 else (9, 7, 3)
            image = rng.integers(0, 60, size) + (150 if label != 1 else 0)
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / "good" / name / f"{number}.png")
    for name in ("a \x1b[31m", "b\udcff", "c\n"):
        (folder / "odd" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 6), (50 * number, 0, 0)).save(folder / "odd" / name / f"{number} \udcfe.png")
    (folder / "odd" / name / "broken\n.png").write_bytes(b"")
    for kind in ("cut", "link", "empty"):
        for name in ("a", "b", "c"):
            (folder / kind / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 6), (number, 0, 0)).save(folder / kind / name / f"{number}.png")
    Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / "cut" / "b" / "2.png")
    (folder / "cut" / "b" / "2.png").write_bytes((folder / "cut" / "b" / "2.png").read_bytes()[:-400])
    (folder / "link" / "b" / "x.png").symlink_to(folder / "good" / "bright" / "0.png")
    for path in (folder / "empty" / "b").iterdir():
        path.unlink()


def cases(folder, ranks):
    skipped = {"good": {}, "cut": {"bad": "skip"}, "odd": {"bad": "skip"}}
    models = {
        f"{kind} {name}": (kind, {**options, **more})
        for kind, options in skipped.items()
        for name, more in (("trained", {}), ("with fixed bits", {"reproducible": True}))
        if (kind, name) != ("odd", "with fixed bits")
    }
    models |= {kind: (kind, {}) for kind in ("cut", "link", "empty", "none", "odd")}
    return {
        name: [SCRIPT, str(folder / kind), str(folder / f"{name} {ranks}.npz"), json.dumps(options)]
        for name, (kind, options) in models.items()
    }


@pytest.fixture(scope="module")
def trained(once):
    """How trainings on them ended, by number of ranks, and where they are."""

    def train(folder):
        draw(folder)
        return {ranks: in_turn(ranks, cases(folder, ranks), folder / f"on {ranks}") for ranks in (0, 3)}, folder

    return once("pictures", train)


@pytest.fixture
def done(trained):
    return trained[0]


@pytest.fixture
def pictures(trained):
    return trained[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["good trained", "cut trained", "odd trained", "good with fixed bits", "cut with fixed bits"]
)
def test_the_numbers_of_one_rank(pictures, done, name):
    for count in (0, 3):
        assert done[count][name].code == 0, done[count][name].err
    with np.load(pictures / f"{name} 0.npz") as expected, np.load(pictures / f"{name} 3.npz") as together:
        assert np.isfinite(expected["loss"]).all()
        for key in expected:
            if "fixed" in name:
                np.testing.assert_array_equal(together[key], expected[key], err_msg=key)
            else:
                np.testing.assert_allclose(together[key], expected[key], rtol=1e-10, atol=1e-12, err_msg=key)
    if name.startswith("cut"):
        assert "skipped: " in done[3][name].err
        assert "b/2.png: damaged" in done[3][name].err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "cut/b/2.png: damaged"),
        ("link", "link/b/x.png: a link that leads out of"),
        ("empty", "empty/b: no pictures"),
        ("none", "none: not found, or not a folder"),
        ("odd", r"odd/c\n/broken\n.png: not a picture"),
    ],
)
def test_what_is_wrong_ends_all_ranks_in_one_line(done, name, message):
    finished = done[3][name]
    assert finished.code == 65, finished.err
    (line,) = [message for message in finished.err.splitlines() if message.startswith("dptrain.errors.AgreedError: ")]
    assert message in line
    assert message in done[0][name].err
