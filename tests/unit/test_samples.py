"""Every run of the tests takes samples; a long one, and chosen files, take all."""

import sys

import pytest

from tests.conftest import ROOT
from tests.launching import run
from tests.sample import SAMPLED, examples, sample


def kept(parameters):
    return [parameter for parameter in parameters if not hasattr(parameter, "marks")]


def test_some_cases_are_in_every_run_and_all_in_a_long_one():
    cases = sample(range(7), 3)
    assert kept(cases) == [0, 3, 6]
    assert [case if case in (0, 3, 6) else case.values for case in cases] == [0, (1,), (2,), 3, (4,), (5,), 6]
    assert {mark.name for case in cases if case not in (0, 3, 6) for mark in case.marks} == {"long"}


@pytest.mark.parametrize(("every", "first", "expected"), [(2, 0, ["a", "c"]), (2, 1, ["b"]), (3, 2, ["c"])])
def test_where_a_sample_begins(every, first, expected):
    assert kept(sample("abc", every, first)) == expected


def test_a_tuple_is_several_arguments_or_the_value_of_one():
    assert sample([(1, 2), (3, 4)], 2)[1].values == (3, 4)
    assert sample([(1, 2), (3, 4)], 2, single=True)[1].values == ((3, 4),)


def test_examples(monkeypatch):
    monkeypatch.setenv(SAMPLED, "1")
    assert [examples(count) for count in (1, 40, 150)] == [1, 10, 37]
    monkeypatch.delenv(SAMPLED)
    assert examples(40) == 40


def collected(*arguments, **environment):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    finished = run(command, cwd=ROOT, timeout=300, **{SAMPLED: None} | environment)
    assert finished.code == 0, finished.out + finished.err
    return {line for line in finished.out.splitlines() if "::" in line}


@pytest.mark.long
def test_chosen_files_run_all_unless_a_run_of_samples_starts_them():
    file = "tests/unit/applications/test_networks.py"
    of_file, sampled = collected(file), collected(file, **{SAMPLED: "1"})
    assert sampled < of_file
    assert {line.split("[")[0] for line in sampled} == {line.split("[")[0] for line in of_file}
    assert collected("-o", f"testpaths={file}") == sampled
    assert collected("-o", f"testpaths={file}", "--long") == of_file
    assert collected("-o", f"testpaths={file}", "--long", "-m", "long") == of_file - sampled
