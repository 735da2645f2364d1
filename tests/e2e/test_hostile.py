"""The benchmark that tries hostile inputs: some of them, and readers that it must catch."""

import os
import pickle
import re
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.launching import run
from tests.sample import sample

pytest.importorskip("h5py", reason="needs the extra 'keras-files'")


@pytest.mark.long
@pytest.mark.parametrize("count", sample([4, 16], 2))
def test_some_inputs_are_refused_or_taken_for_what_they_say(tmp_path, count):
    arguments = ["--count", str(count), "--undamaged", "0", "--jobs", "1"]
    done = run([sys.executable, str(ROOT / "benchmarks/hostile.py"), *arguments], timeout=300, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    faults = "0 executed, 0 outside touched, 0 traceback, 0 slow, 0 exit code, 0 other"
    assert re.search(rf"^{count} inputs: {faults};", done.out, re.MULTILINE)


@pytest.fixture
def hostile(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hostile

    import dptrain.cli.main  # noqa: F401  # before the forks

    return hostile


def unpickle(arena):
    from damages import Opened

    return str(pickle.loads(pickle.dumps(Opened(arena.inside / "x"))))


def fail(error):
    raise error


def say(text):
    os.write(1, text.encode())
    return "right"


def refuse_twice():
    from dptrain.errors import DataError

    print("dptrain: it is damaged", file=sys.stderr)
    raise DataError("it is damaged")


# What a reader does, and what is wrong with it.
READERS = {
    "returns": (lambda arena: "right", ""),
    "writes inside": (lambda arena: (arena.inside / "new").write_text("x") and "right", ""),
    "runs a shell": (lambda arena: str(os.system(f"touch {arena.executed}")), "executed"),
    "imports": (lambda arena: exec(compile("x = 1", arena.inside / "evil.py", "exec")) or "right", "executed"),
    "unpickles": (unpickle, "executed"),
    "overwrites": (lambda arena: str((arena.outside / "canary.txt").write_text("x")), "outside touched"),
    "removes": (lambda arena: (arena.outside / "lock").unlink() or "right", "outside touched"),
    "changes a mode": (lambda arena: (arena.outside / "canary.txt").chmod(0o777) or "right", "outside touched"),
    "writes elsewhere": (lambda arena: open(arena.folder.parent / "x", "w").close() or "right", "outside touched"),
    "prints a secret": (lambda arena: say((arena.outside / "lock").read_text()), "outside touched"),
    "copies a secret": (
        lambda arena: str((arena.inside / "copy").write_bytes((arena.outside / "lock").read_bytes())),
        "outside touched",
    ),
    "shows a traceback": (lambda arena: say("Traceback (most recent call last)"), "traceback"),
    "hangs": (lambda arena: time.sleep(60), "slow"),
    "is slow": (lambda arena: time.sleep(0.7) or "right", "slow"),
    "has an internal error": (lambda arena: fail(RuntimeError("x")), "exit code"),
    "ends by a signal": (lambda arena: os.kill(os.getpid(), 9), "exit code"),
    "says it twice": (lambda arena: refuse_twice(), "other"),
    "moves the cursor": (lambda arena: say("\x1b[2J"), "other"),
    "takes other values": (lambda arena: "wrong", "other"),
}


@pytest.mark.parametrize("name", sample(READERS, 3, first=2))
def test_what_a_reader_does_is_seen(hostile, tmp_path, monkeypatch, name):
    reader, expected = READERS[name]
    if expected == "slow":
        monkeypatch.setattr(hostile, "SECONDS", 0.5)
        monkeypatch.setattr(hostile, "LIMIT", 1.0)
    arena = hostile.Arena(tmp_path / "arena")
    arena.prepare()
    before = arena.canaries()
    tried = hostile.Input("exported program", "bit", "program.safetensors", lambda: reader(arena))
    wrong = hostile.judge(tried, arena, before, "right", hostile.run(arena, tried))
    assert (expected in wrong) == bool(expected), wrong
    assert expected or not wrong


def test_what_is_drawn_is_the_same_for_the_same_number(hostile, tmp_path, monkeypatch):
    for name in ("table.csv", "set.npz", "plan.yaml", "config.yaml"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    monkeypatch.setattr(hostile, "KINDS", {name: hostile.KINDS[name] for name in ("table", "shared memory")})
    drawn = []
    for number in (*range(8), *range(8)):
        arena = hostile.Arena(tmp_path / "arena")
        drawn_input = hostile.draw(3, number, arena, tmp_path)
        drawn.append((drawn_input.kind, drawn_input.damage, drawn_input.file, drawn_input.apart))
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) > 3
