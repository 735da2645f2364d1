"""Texts are the same on any number of ranks, wherever the weights lie; ranks that ask for others are told."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import in_turn
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/generation.py")


def generate(folder, ranks, *ways):
    cases = {way: [SCRIPT, str(folder / f"{way}.json"), "cpu", way] for way in ways}
    done = in_turn(ranks, cases, folder / f"on {ranks}", limit=100)
    for way in ways:
        if way == "different":
            assert done[way].code == 2
            (line,) = done[way].messages
            assert "the ranks call generate differently" in line
        else:
            assert (done[way].code, done[way].err) == (0, "")
    return {way: json.loads((folder / f"{way}.json").read_text()) for way in ways if way != "different"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("generation"), 0, "whole")["whole"]


@pytest.mark.parametrize("ranks", sample([2, 3], 2))
def test_texts_of_one_rank(alone, tmp_path, ranks):
    for way, texts in generate(tmp_path, ranks, "whole", "shards", "different").items():
        assert texts == alone, way
