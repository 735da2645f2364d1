"""The benchmark that plants bugs says what becomes of them."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT

KERNEL = """\
// a < b
#define LEAST 1
int least(int a, int b) { return a < b ? a : b; }  // 1 < 2
"""
PYTHON = """\
BLOCK, LANES = 1024, 16

def least(a: int | None = 1, b: int = 2) -> int | None:
    if a < 0:
        raise ValueError(f"{a + 1}")
    return dict(zip([a.reshape(-1)], [b], strict=True))
"""
# What stands for `mutant_judge.py`: sees the mutant.
JUDGE = f"""\
import os, sys, time
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import mutant_judge
def work(request, say):
    for unit in request["units"]:
        wrong = ""
        if "<=" in open("kernels/least.h").read():
            WHAT
        say(dict(unit=unit, wrong=wrong, code=1, bits=1, seconds=0.1))
mutant_judge.serve(work)
"""


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    """The modules, for a repository with one kernel."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import mutant_draw
    import mutant_judge
    import mutant_trial
    import mutants

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "least.h").write_text(KERNEL)
    (tmp_path / "benchmarks").mkdir()
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutant_draw, "ROOT", tmp_path)
    monkeypatch.setattr(mutant_draw, "PYTHON", ())
    devices = [
        mutant_trial.Device(name, (), (files,), 20) for name, files in (("cpu", "kernels"), ("other", "dptrain"))
    ]
    monkeypatch.setattr(mutant_trial, "DEVICES", devices)
    mutant_draw.places.cache_clear()
    return SimpleNamespace(draw=mutant_draw, judge=mutant_judge, trial=mutant_trial, run=mutants)


@pytest.fixture
def units(mutants):
    """Two that reach the kernel, one that does not."""
    reached = {"lines": {}, "code": 1, "bits": 1, "names": ["least.h:least"]}
    reports = [reached | {"unit": f"cpu {n}", "seconds": 3 - n} for n in range(2)]
    reports.append(reached | {"unit": "cpu 2", "seconds": 0.1, "names": ["least.h:LEAST"]})
    return mutants.trial.Units({"cpu": reports, "other": []})


def mutant(mutants):
    return mutants.draw.Mutant(0, "kernels/least.h", "bound", KERNEL.replace("a < b ?", "a <= b ?"))


def test_code_is_changed_and_nothing_else(mutants):
    mutated = [make().splitlines() for place in mutants.draw.places("kernels/least.h") for _, make in place]
    assert {tuple(lines[:2]) for lines in mutated} == {tuple(KERNEL.splitlines()[:2])}
    assert [lines[2].split("return ")[1].split(";")[0] for lines in mutated] == ["a <= b ? a : b", "a > b ? a : b"]


def test_what_computes_nothing_is_left_alone(mutants):
    lines = PYTHON.splitlines()
    killers = [
        "\n".join(lines[first[0] - 1 : last[0]])[first[1] : last[1] - len(lines[last[0] - 1]) or None]
        for first, last in mutants.draw._computes_nothing(PYTHON, ("BLOCK",))
    ]
    assert sorted(killers) == ["-1", "1024", "True", "int", "int | None", "int | None", 'raise ValueError(f"{a + 1}")']


def test_sizes_and_other_processors_are_left_alone(mutants, monkeypatch, tmp_path):
    monkeypatch.setattr(mutants.draw, "SIZES", {"kernels/least.h": ("LEAST",)})
    text = "#if defined(__AVX__)\nint a = 1;\n#else\nint a = 2;\n#endif\nint LEAST = 3, b = 4;\n"
    (tmp_path / "kernels" / "least.h").write_text(text)
    texts = [make() for place in mutants.draw.places("kernels/least.h") for _, make in place]
    assert texts == [text.replace("= 1", "= (1 + 1)"), text.replace("= 4", "= (4 + 1)")]


@pytest.mark.parametrize(
    ("what", "killer", "senseless", "printed"),
    [
        ("pass", "", False, ""),
        ("wrong = 'no number'", "cpu 1", False, "no number"),
        ("wrong = 'x.h:3:1: error: no'", "cpu 1", True, "error: no"),
        ("os.kill(os.getpid(), 11)", "cpu 1", False, "ends with -11"),
        ("time.sleep(60)", "cpu 1", False, "hangs: no thread has wanted to run"),
        ("raise ValueError('it said so')", "cpu 1", False, "it said so"),
    ],
)
def test_a_verdict(mutants, units, monkeypatch, tmp_path, what, killer, senseless, printed):
    usual = mutants.trial.IDLE
    monkeypatch.setattr(mutants.trial, "IDLE", 1 if "sleep" in what else usual)
    (tmp_path / "benchmarks" / "mutant_judge.py").write_text(JUDGE.replace("WHAT", what))
    copy = mutants.trial.Copy(tmp_path / "work")
    verdict = copy.judge(mutant(mutants), units)
    monkeypatch.setattr(mutants.trial, "IDLE", usual)  # on a busy machine a judge may wait for its turn
    again = copy.judge(mutants.draw.Mutant(1, "kernels/least.h", "none", KERNEL), units)
    copy.close()
    assert (verdict.killer, verdict.is_senseless) == (killer, senseless)
    assert printed in verdict.printed
    assert (verdict.effect, verdict.run, verdict.reached) == (("", 1, 2) if killer else ("code, and no bits", 2, 2))
    assert verdict.mutant.difference().splitlines()[1:] == [
        "-int least(int a, int b) { return a < b ? a : b; }  // 1 < 2",
        "+int least(int a, int b) { return a <= b ? a : b; }  // 1 < 2",
    ]
    assert (again.killer, again.run) == ("", 2), "the copy is as it was"


def test_what_has_noticed_mutants_of_a_file_comes_first(mutants, units):
    (device, _), mutated = mutants.trial.DEVICES, mutant(mutants)
    assert units.reaching(device, mutated) == ["cpu 1", "cpu 0"]
    units.has_killed(mutated.file, device, "cpu 0")
    assert units.reaching(device, mutated) == ["cpu 0", "cpu 1"]


def test_the_lines_that_a_unit_must_have_reached(mutants):
    assert mutants.trial._statement(PYTHON, 1) == set(), "whoever imports it"
    assert mutants.trial._statement(PYTHON, 3) == set()
    assert mutants.trial._statement(PYTHON, 4) == {4}
    assert mutants.trial._statement("def f():\n    return g(\n        1,\n    )\n", 3) == {2, 3, 4}


def test_definitions_of_headers(mutants, tmp_path):
    text = (
        "#define TWICE(x) \\\n    thrice(x)\nstatic const int A = 1, B = 2;\n"
        "template <class T> T thrice(T x) {\n    return A * x;\n}\nstruct Pair { int a; };\n"
        'namespace {\nint inside() { return 0; }\n}\nextern "C" {\nint outside() {\n}\n}  // extern "C"\n'
    )
    (tmp_path / "kernels" / "least.h").write_text(text)
    assert mutants.judge.definitions(text) == [
        (1, 2, "TWICE"),
        *((3, 3, name) for name in "AB"),
        (4, 6, "thrice"),
        (7, 7, "Pair"),
        (9, 9, "inside"),
        (12, 13, "outside"),
    ]
    headers = mutants.judge.Headers(tmp_path / "kernels")
    assert headers.reached("TWICE(3)", ["least.h"]) == {f"least.h:{name}" for name in ("TWICE", "thrice", *"AB")}
    assert headers.reached("TWICE(3)", ["other.h"]) == set()


def test_the_same_number_is_the_same_mutant(mutants):
    assert mutants.draw.draw(0, 3) == mutants.draw.draw(0, 3)
    assert len({mutants.draw.draw(0, number).text for number in range(20)}) == 2


def test_a_run_goes_on_where_it_was_stopped(mutants, units, monkeypatch, tmp_path):
    (tmp_path / "benchmarks" / "mutant_judge.py").write_text(JUDGE.replace("<=", "a").replace("WHAT", "wrong = 'no'"))
    path, copy = tmp_path / "journal", mutants.trial.Copy(tmp_path / "work")

    def run(count):
        return list(mutants.run.judged(0, count, 1, mutants.run.Journal(path, 0), copy, units))

    (first,) = run(1)
    assert len(path.read_text().splitlines()) == 1
    assert json.loads(path.read_text())["killer"] == "cpu 1"
    monkeypatch.setattr(mutants.trial, "DEVICES", ())
    again, second = run(2)
    assert (again.mutant, again.killer, second.killer, second.effect) == (
        first.mutant,
        "cpu 1",
        "",
        "nothing: not reached",
    )
    assert len(path.read_text().splitlines()) == 2
    copy.close()
    assert mutants.run.Journal(path, 1).find(first.mutant) is None, "another seed draws another mutant"
