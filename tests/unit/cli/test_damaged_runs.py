"""A run whose config.yaml or metrics.jsonl is damaged: named in one line where it is needed, mended by a resume."""

import json
import os
from pathlib import Path

import pytest

from dptrain.cli.options.config import Config, to_yaml
from dptrain.cli.run_directory import RunDirectory
from dptrain.cli.run_records import read_config, read_epochs, read_runs
from dptrain.errors import DataError
from dptrain.saving.run_folder import model_file

EPOCHS = [{"epoch": n, "loss": 1 / n, "val_loss": 2 / n, "seconds": 1.0} for n in (1, 2)]
BOMB = b"a: &a [x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n" + b"".join(
    b"%c: &%c [%s]\n" % (after, after, b", ".join([b"*%c" % before] * 8))
    for before, after in zip(b"bcdef", b"cdefg", strict=True)
)
CONTENTS = {
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: whole.rfind(b":", 0, len(whole) // 2)],  # within a line: the rest is no YAML
    "binary": lambda whole: bytes(range(256)),
    "zeros": lambda whole: bytes(len(whole)),
    "codes for the terminal": lambda whole: b"\x1b]0;title\x07: [\x1b[2J\n" * 2,
    "other values": lambda whole: b"1\n2\n",
    "deep": lambda whole: b"[" * 100_000 + b"\n",
    "bomb": lambda whole: BOMB,
}
KINDS = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to("/etc/hostname")}


@pytest.fixture(params=[*CONTENTS, "huge", *KINDS])
def damage(request):
    """What is done to a file."""

    def act(path: Path) -> None:
        content = path.read_bytes()
        if request.param in CONTENTS:
            path.write_bytes(CONTENTS[request.param](content))
        elif request.param == "huge":
            os.truncate(path, 1 << 40)
        else:
            path.unlink()
            KINDS[request.param](path)

    return act


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two epochs that was killed, whose model is there all the same."""
    with RunDirectory(tmp_path / "run", to_yaml(Config())) as directory:
        for epoch in EPOCHS:
            directory.add_epoch(epoch)
    (tmp_path / "run" / "model.keras").write_bytes(b"PK")
    return tmp_path / "run"


def resume(run: Path) -> None:
    """Go on as a training does, from a checkpoint after the first epoch."""
    with RunDirectory(run, to_yaml(Config()), resumes=True) as directory:
        assert directory.continues
        directory.keep_epochs(EPOCHS[:1])
        directory.add_epoch(EPOCHS[1])
        directory.finish({}, {"metrics": {}, "epochs": 2})
    assert [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] == EPOCHS
    assert read_config(run) == Config()


def test_a_damaged_configuration_is_named(run, damage):
    assert read_config(run) == Config()
    damage(run / "config.yaml")
    with pytest.raises(DataError, match=r"config\.yaml") as caught:
        read_config(run)
    assert str(caught.value).isprintable()
    assert model_file(run) == run / "model.keras"
    runs, others = read_runs(run.parent)
    assert len(runs) + len(others) == 1
    assert all(reason.isprintable() for _, reason in others)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_resume_mends_a_damaged_file_or_refuses_what_is_none(run, damage, name):
    damage(run / name)
    if (run / name).is_file() and not (run / name).is_symlink():
        resume(run)
        return
    with pytest.raises(DataError, match=rf"{name}: it is a (named pipe|folder|link), expected a regular file"):
        resume(run)


def test_damaged_metrics_are_shown_as_far_as_they_can_be_read(run, damage):
    assert read_epochs(run) == EPOCHS
    damage(run / "metrics.jsonl")
    runs, others = read_runs(run.parent)
    assert [run.epochs in (0, 1, 2) for run in runs] == [True] * (1 - len(others))
    try:
        assert all("epoch" in epoch for epoch in read_epochs(run))
    except DataError as error:
        assert str(error).startswith(str(run))  # noqa: PT017 - whether it is one depends on the damage
