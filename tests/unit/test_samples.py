"""Every run of the tests takes samples; a long one, and chosen files, take all."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.launching import run
from tests.sample import SAMPLED, examples, mark_long, sample


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


class Case(SimpleNamespace):
    """What `mark_long` asks of a case: its name and marks."""

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, decorator):
        self.marks.append(decorator.mark)


def in_every_run(count, *marks, file="unit/test_a.py", name="test"):
    """Return the numbers of a test's cases that are not long."""
    names, path = [f"tests/{file}::{name}[{number}]" for number in range(count)], Path("/tests", file)
    cases = [Case(nodeid=case, path=path, marks=[mark.mark for mark in marks]) for case in names]
    mark_long(cases, Path("/tests"))
    return [number for number, case in enumerate(cases) if case.get_closest_marker("long") is None]


@pytest.mark.parametrize(
    ("file", "count", "every"),
    [("unit/test_a.py", 7, 3), ("unit/test_a.py", 3, 1), ("unit/program/a/test_a.py", 7, 2), ("mpi/test_a.py", 7, 1)],
)
def test_of_many_cases_each_so_many_th_is_in_every_run(file, count, every):
    kept = in_every_run(count, file=file)
    assert kept[0] < every
    assert kept == list(range(kept[0], count, every))


def test_tests_of_a_table_take_different_rows():
    assert {row for name in "abcdefgh" for row in in_every_run(9, name=name)} == set(range(9))


def test_a_test_may_say_how_many_of_its_cases_are_in_every_run():
    assert in_every_run(7, pytest.mark.sample(4, 1)) == [1, 5]
    assert in_every_run(7, pytest.mark.sample(1)) == list(range(7))
    assert len(in_every_run(2, pytest.mark.sample(4))) == 1, "each test keeps one"
    assert in_every_run(7, pytest.mark.long) == []


def test_what_is_sampled_anyway_is_not_again():
    cases = [Case(nodeid=f"test[{number}]", path=Path("/tests/unit/test_a.py"), marks=[]) for number in range(9)]
    cases[3].add_marker(pytest.mark.long)
    mark_long(cases, Path("/tests"))
    assert [len(case.marks) for case in cases] == [0, 0, 0, 1, 0, 0, 0, 0, 0]


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
