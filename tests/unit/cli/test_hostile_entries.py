"""Whatever lies in a folder, under whichever name: what works there refuses it, or works, and touches nothing else."""

import contextlib
import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.cli import run_directory
from dptrain.cli.run_directory import RunDirectory
from dptrain.cli.run_records import read_config, read_epochs, read_runs
from dptrain.errors import DataError, DptrainError
from dptrain.saving.checkpoints import CheckpointDirectory, Content, located, newest, newest_name
from dptrain.saving.run_folder import model_file
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial

RUN, PLAN = Run(0, 0, 0), {"seeds": [0]}


def work_as_a_run(path: Path) -> None:
    with RunDirectory(path, "seed: 1\n", resumes=True) as run:
        run.keep_epochs([])
        run.add_epoch({"epoch": 1, "loss": 1.0})
        run.finish({"model.keras": b"PK"}, {})


def work_as_checkpoints(path: Path) -> None:
    directory = CheckpointDirectory(path / "checkpoints", keep=1, advice="x", follow=False)
    try:
        with contextlib.suppress(DataError):
            newest(directory.candidates(), [])
        directory.probe(10)
        for step in (1, 2):
            directory.save(step, {"state.json": Content(lambda: [b"{}"])})
        directory.wait()
        directory.delete()
    finally:
        directory.close()


def work_as_a_sweep(path: Path) -> None:
    with SweepDirectory(path, PLAN) as sweep:
        if not sweep.trials:
            sweep.add_trial(Trial(0, {"x": 1}))
            sweep.add_epoch(RUN, 1, {"loss": 1.0})
            sweep.add_ending(Ending(RUN, Status.PAUSED, 1, 1.0), b"state")
        sweep.add_model(RUN, b"PK")
        sweep.keep_models([])
        sweep.release(RUN)
        list(sweep.epochs())


def read_newest(path: Path) -> None:
    candidates, follow = located(path)
    newest(candidates, [], follow=follow)


READERS = (
    *(lambda path: read_runs(path.parent), read_config, read_epochs, model_file, read_newest),
    lambda path: newest_name(path / "checkpoints"),
)
WORKERS = {"run": work_as_a_run, "checkpoints": work_as_checkpoints, "sweep": work_as_a_sweep}
NAMES = [
    *("config.yaml", "metrics.jsonl", "summary.json", "model.keras", "best.keras", "curves.png"),
    *("report.html", "lock", "holder"),
    *("checkpoints", "checkpoints/000001-step-1", "checkpoints/.000001-step-1.1.tmp", "checkpoints/.probe.1.tmp"),
    *("checkpoints/000001-step-1/manifest.json", "checkpoints/000001-step-1/state.json", "checkpoints/lock"),
    *("sweep.yaml", "journal.jsonl", "results.jsonl", "states", "states/0-1.safetensors", "states/.x.1.tmp"),
    *("models", "models/trial-0-seed-0.keras", "models/.trial-0-seed-0.keras.1.tmp", ".sweep.yaml.1.tmp"),
    *(".config.yaml.1.tmp", "tensorboard", "trials.csv", "report.html"),
]
KINDS = {
    "link to a file": lambda path, canary: path.symlink_to(canary / "file"),
    "link to a folder": lambda path, canary: path.symlink_to(canary),
    "link to itself": lambda path, canary: path.symlink_to(path),
    "link to nothing": lambda path, canary: path.symlink_to(canary / "made"),
    "pipe": lambda path, canary: os.mkfifo(path),
    "folder": lambda path, canary: (path / "inner").mkdir(parents=True),
    "second name": lambda path, canary: os.link(canary / "file", path),
    "empty": lambda path, canary: path.write_bytes(b""),
    "garbage": lambda path, canary: path.write_bytes(b'\x1b[2J{"a": [\xff\n1\n'),
    "sparse": lambda path, canary: os.truncate(path, path.write_bytes(b"") or 1 << 40),
}


def content(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def put(path: Path, kind: str, canary: Path) -> None:
    """Put an entry there, unless a folder is there, or its own folder is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if path.parent.resolve() == path.parent:
            if os.path.lexists(path):
                path.unlink()
            KINDS[kind](path, canary)


@settings(max_examples=30, deadline=None)
@given(
    begins=st.sampled_from([None, *WORKERS]),
    works=st.sampled_from(sorted(WORKERS)),
    placed=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(sorted(KINDS))), min_size=1, max_size=4),
)
def test_nothing_but_the_folder_is_touched(begins, works, placed):
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        stack.enter_context(mock.patch.object(run_directory, "draw_curves", return_value=b"PNG"))
        stack.enter_context(mock.patch("os.fsync"))
        path, canary = root / "folder", root / "canary"
        (canary / "000001-step-1").mkdir(parents=True)
        for name in ("file", "0-1.safetensors", "trial-0-seed-0.keras", "000001-step-1/state.json"):
            (canary / name).write_bytes(b"alive")
        before = content(canary)
        path.mkdir()
        if begins is not None:
            WORKERS[begins](path)
        for name, kind in placed:
            put(path / name, kind, canary)
        assert content(canary) == before
        for act in (*READERS, WORKERS[works], *READERS):
            with contextlib.suppress(DptrainError):
                act(path)
        assert content(canary) == before
