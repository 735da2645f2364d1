"""An ensemble on several ranks: each trains some of the members, all have all of them in the end."""

import json
import re
from pathlib import Path

import pytest

from tests.launching import python

SCRIPT = str(Path(__file__).parent / "scripts" / "ensemble.py")


@pytest.mark.long
def test_any_number_of_ranks_trains_the_same_members(tmp_path):
    results = []
    for ranks in (0, 3):
        done = python(ranks, SCRIPT, str(tmp_path / "out.json"), "-1", timeout=120, OPENBLAS_NUM_THREADS="1")
        assert (done.code, done.err) == (0, "")
        assert re.findall(r"^Epoch (\d)/2 - 4 members - ", done.out, re.MULTILINE) == ["1", "2"]
        results.append(json.loads((tmp_path / "out.json").read_text()))
    alone, three = results
    for name in ("scores", "together"):  # of all ranks together: to rounding
        assert three.pop(name) == pytest.approx(alone.pop(name), rel=1e-5)
    assert three == alone


def test_a_member_that_fails_on_one_rank_ends_all_with_one_line(tmp_path):
    done = python(2, SCRIPT, str(tmp_path / "out.json"), "3", timeout=120, OPENBLAS_NUM_THREADS="1")
    assert done.code == 70
    [line] = done.messages
    assert "ValueError: member 3 (seed 3): no epochs (rank 1, " in line
