"""The benchmark that plants bugs says what becomes of them."""

import subprocess

import pytest

from tests.conftest import ROOT

KERNEL = """\
// a < b
#define LEAST 1
int least(int a, int b) { return a < b ? a : b; }  // 1 < 2
"""
PYTHON = """\
def least(a: int | None = 1, b: int = 2) -> int | None:
    if a < 0:
        raise ValueError(f"{a + 1}")
    return dict(zip([a + 1], [b], strict=True))
"""


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    """The module, for a repository with one kernel."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mutants

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "least.h").write_text(KERNEL)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PYTHON", ())
    mutants.places.cache_clear()
    return mutants


def test_code_is_changed_and_nothing_else(mutants):
    made = [make().splitlines() for place in mutants.places("kernels/least.h") for _, make in place]
    assert {tuple(lines[:2]) for lines in made} == {tuple(KERNEL.splitlines()[:2])}
    assert [lines[2].split("return ")[1].split(";")[0] for lines in made] == ["a <= b ? a : b", "a > b ? a : b"]


def test_what_computes_nothing_is_left_alone(mutants):
    lines = PYTHON.splitlines()
    found = [
        "\n".join(lines[first[0] - 1 : last[0]])[first[1] : last[1] - len(lines[last[0] - 1]) or None]
        for first, last in mutants._computes_nothing(PYTHON)
    ]
    assert sorted(found) == ["True", "int", "int | None", "int | None", 'raise ValueError(f"{a + 1}")']


@pytest.mark.parametrize(
    ("code", "printed", "verdict"),
    [(0, "fine", ("", False)), (1, "wrong", ("one", False)), (1, "x.h:3:1: error: no", ("one", True))],
)
def test_a_verdict(mutants, monkeypatch, tmp_path, code, printed, verdict):
    seen = f"import os, sys; seen = '<=' in open('kernels/least.h').read(); print({printed!r}); sys.exit(seen * {code})"
    killers = (mutants.Killer("other", ("-c", "1 / 0"), ("dptrain",)), mutants.Killer("one", ("-c", seen)))
    monkeypatch.setattr(mutants, "KILLERS", killers)
    (tmp_path / "work").mkdir()
    copy = mutants.Copy(tmp_path / "work")
    found = copy.judge(mutants.Mutant(0, "kernels/least.h", "bound", KERNEL.replace("a < b ?", "a <= b ?")))
    assert (found.killer, found.is_senseless) == verdict
    assert found.mutant.difference().splitlines()[1:] == [
        "-int least(int a, int b) { return a < b ? a : b; }  // 1 < 2",
        "+int least(int a, int b) { return a <= b ? a : b; }  // 1 < 2",
    ]
    assert copy.run(killers[1])[0] == 0, "the copy is as it was"


def test_the_same_number_is_the_same_mutant(mutants):
    assert mutants.draw(0, 3) == mutants.draw(0, 3)
    assert len({mutants.draw(0, number).text for number in range(20)}) == 2


def test_a_run_goes_on_where_it_was_stopped(mutants, monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "KILLERS", (mutants.Killer("one", ("-c", "raise SystemExit(1)")),))
    path = tmp_path / "journal"

    def run(count):
        return list(mutants.judged(0, count, 1, 1, False, mutants.Journal(path, 0)))

    (first,) = run(1)
    assert len(path.read_text().splitlines()) == 1
    monkeypatch.setattr(mutants, "KILLERS", ())
    again, second = run(2)
    assert (again.mutant, again.killer, second.killer) == (first.mutant, "one", "")
    assert len(path.read_text().splitlines()) == 2
    assert mutants.Journal(path, 1).find(first.mutant) is None, "another seed draws another mutant"
