"""The same fault on one rank and on three names the same sample, row, file or step, in the same words."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, python
from tests.sample import sample, taken

pytest.importorskip("PIL", reason="faults of pictures need the extra 'images'")
pytest.importorskip("pandas", reason="faults of tables need the extra 'tables'")

SCRIPT = str(ROOT / "tests/mpi/scripts/named_faults.py")
PLACES = (0, 14, 29)  # of each rank of three
TAKEN = taken(PLACES, 2)  # at least two: see the script
# What must be named of the fault at each place; {batch} is the place in a batch of ten.
NAMED = {
    "NaN": "x is not finite in sample {row}",
    "NaN, shuffled": "x is not finite in sample {row}",
    "NaN in small batches": "x is not finite in sample {row}",
    "NaN in one batch": "x is not finite in sample {row}",
    "NaN of a generator": "x is not finite in sample {batch} of its batch",
    "NaN of a data set": "x is not finite in sample {batch} of its batch",
    "NaN in targets": "y is not finite in sample {row}",
    "NaN in weights": "1 values are not finite, the first at index {row}$",
    "NaN in weights of steps": "1 values are not finite, the first at index {row}, 2$",
    "root": "the first to produce a NaN, .*of sample {row};",
    "overflow": "the first to produce an infinity, .*of sample {row};",
    "label": "label 4 at index {row};",
    "label of a generator": "label 4 at index {batch};",
    "label of a data set": "label 4 at index {batch};",
    "label of a validation": "label 7 at index {row};",
    "label to evaluate": "label 4 at index {row};",
    "outlier": r"^\[1\]$",
    "cell of a table": r"/{row}\.csv, row {line}, column 'x'",
    "text": r"/[ab]/{row:02}\.txt: byte e9 at 0",
    "picture": r"/[ab]/{row:02}\.png: damaged",
    "picture of a data set": r"/[ab]/{row:02}\.png: damaged",
}
# Faults that the rank reports which has the sample, and ends the job.
OF_A_RANK = {
    "id": "id 9 of sample {row} ",
    "id among all ids": "id 9 of sample {row} ",
    "id to evaluate": "id 9 of sample {row} ",
    "id to predict": "id 9 of sample {row} ",
    "id of a generator": "id 9 of sample {batch} ",
    "id of a data set": "id 9 of sample {batch} ",
}
# What ranks may see differently: who reports, and places in arrays of their rows.
_OWN = re.compile(r" \(ranks? [^)]*\)|at \[[^]]*\] of shape \([^)]*\),")


@pytest.fixture(scope="module")
def messages(once):
    """What is said of each fault at each place, by one rank and by three."""

    def run(ranks: int) -> dict[str, list[str]]:
        words = (",".join(map(str, TAKEN)), *NAMED)
        done = once(f"named faults on {ranks}", lambda folder: python(ranks, SCRIPT, str(folder), *words, timeout=240))
        assert done.code == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    return run(0), run(3)


@pytest.mark.parametrize("row", sample(PLACES, 2))
@pytest.mark.parametrize("fault", NAMED)
def test_any_number_of_ranks_names_the_same(messages, fault, row):
    text, together = (of_ranks[fault][TAKEN.index(row)] for of_ranks in messages)
    assert _OWN.sub("", together) == _OWN.sub("", text)
    assert re.search(NAMED[fault].format(row=row, batch=row % 10, line=row + 2), text), text


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 3])
def test_the_rank_that_has_a_sample_names_it(once, ranks):
    cases = [(fault, row) for number, fault in enumerate(OF_A_RANK) for row in taken(PLACES, 3, number)]

    def run(folder: Path) -> dict[str, Finished]:
        words = {f"{fault} {row}": [SCRIPT, str(folder), str(row), fault] for fault, row in cases}
        return in_turn(ranks, words, folder / "in turn")

    done = once(f"named faults of a rank on {ranks}", run)
    for fault, row in cases:
        finished = done[f"{fault} {row}"]
        assert finished.code == (65 if ranks else 1)
        assert re.search(OF_A_RANK[fault].format(row=row, batch=row % 10), finished.err), finished.err
