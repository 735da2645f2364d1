"""Damaged and senseless inputs, some of each kind; `benchmarks/fuzz.py` tries thousands."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import run
from tests.sample import sample

pytest.importorskip("h5py", reason="needs the extra 'keras-files'")


@pytest.mark.parametrize("count", sample([15, 60], 2))
def test_inputs_are_refused_in_one_line_or_taken_for_what_they_say(tmp_path, count):
    arguments = ["--count", str(count), "--flips", "5", "--jobs", "1", "--seed", "1"]
    done = run([sys.executable, str(ROOT / "benchmarks/fuzz.py"), *arguments], timeout=120, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    tried, wrong = map(int, re.findall(r"(\d+) inputs: (\d+) not as they should be", done.out)[0])
    assert tried >= count
    assert wrong == 0
