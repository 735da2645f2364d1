"""What people see while a sweep runs."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from dptrain.sweeps.records import Ending, Run, Segment, Status, Trial
from dptrain.sweeps.reporting import progress as module
from dptrain.sweeps.reporting.progress import (
    MAX_ROWS,
    LiveProgress,
    PlainProgress,
    Progress,
    make_progress,
)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def trial(number: int, **setting) -> Trial:
    return Trial(number, setting or {"learning_rate": 0.001, "hidden": 128})


def ending(number: int, of: int, seed: int, status=Status.DONE, value=0.5, epochs=5, **options) -> Ending:
    metrics = {} if value is None else {"loss": 0.25, "val_accuracy": value}
    return Ending(Run(number, of, seed), status, epochs, 12.34, metrics, **options)


def plain(total: int | None = 128, seeds: int = 2) -> tuple[PlainProgress, io.StringIO]:
    file = io.StringIO()
    return PlainProgress("val_accuracy", "max", total, seeds, file), file


def live(seeds=2, total: int | None = 128, mode="max", width=120, height=50):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=width, height=height)
    return LiveProgress("val_accuracy", mode, total, seeds, console), file


def picture(progress: LiveProgress, width: int = 120) -> list[str]:
    """Return the lines that the terminal would hold now."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(progress._picture())
    return [line.rstrip() for line in file.getvalue().splitlines()]


def rows(progress: LiveProgress) -> list[list[str]]:
    """Return the words of the table's rows, between its head and "and N more" or the totals."""
    lines = [line.split() for line in picture(progress)[1:]]
    return [words for words in lines if words[0].isdigit()]


def test_plain_lines():
    progress, file = plain()
    progress.note("continuing: 3 of 128 runs were done")
    progress.trial(trial(0))
    for number, seed in ((0, 7), (1, 8)):
        progress.started(Segment(Run(number, 0, seed)), 0)
        progress.epoch(Run(number, 0, seed), 1, {"val_accuracy": 0.1})
    progress.ended(ending(0, 0, 7, value=0.97614))
    progress.ended(ending(1, 0, 8, value=0.97414, epochs=1))
    progress.close()
    progress.close()
    assert file.getvalue().splitlines() == [
        "continuing: 3 of 128 runs were done",
        "run 1/128: trial 0 (learning_rate=0.001, hidden=128) seed 7: val_accuracy 0.9761, 5 epochs, 12.3 s",
        "run 2/128: trial 0 (learning_rate=0.001, hidden=128) seed 8: val_accuracy 0.9741, 1 epoch, 12.3 s",
        "trial 0 (learning_rate=0.001, hidden=128) done: val_accuracy mean 0.9751, std 0.0014, n = 2",
    ]


def test_plain_lines_of_failures():
    progress, file = plain(total=None, seeds=3)
    progress.trial(Trial(4, {}))
    progress.ended(ending(12, 4, 0, Status.DIVERGED, epochs=2, reason="loss is nan\nat step 3", exit_code=76))
    progress.ended(ending(13, 4, 1, Status.FAILED, value=None, epochs=1, exit_code=69))
    progress.ended(ending(14, 4, 2, value=1.5e-7))
    assert file.getvalue().splitlines() == [
        "run 1: trial 4 seed 0: diverged after 2 epochs, 12.3 s: loss is nan at step 3",
        "run 2: trial 4 seed 1: failed after 1 epoch, 12.3 s",
        "run 3: trial 4 seed 2: val_accuracy 1.500e-07, 5 epochs, 12.3 s",
        "trial 4 done, 2 failed: val_accuracy mean 1.500e-07, n = 1",
    ]


def test_plain_lines_where_no_run_has_the_metric():
    progress, file = plain(total=2, seeds=1)
    progress.trial(Trial(0, {}))
    progress.trial(Trial(1, {}))
    progress.ended(ending(0, 0, 0, Status.FAILED, value=None, epochs=0, reason="no memory"))
    progress.ended(ending(1, 1, 0, value=None, epochs=0))
    assert file.getvalue().splitlines() == [
        "run 1/2: trial 0 seed 0: failed after 0 epochs, 12.3 s: no memory",
        "trial 0 failed: no val_accuracy",
        "run 2/2: trial 1 seed 0: no val_accuracy, 0 epochs, 12.3 s",
        "trial 1 done: no val_accuracy",
    ]


def test_a_stopped_trial_is_one_plain_line():
    progress, file = plain(total=4)
    progress.trial(trial(0, a=1))
    progress.trial(trial(1, a=2))
    for status in (Status.PAUSED, Status.PRUNED):
        progress.ended(ending(0, 0, 0, status, 0.25, epochs=3))
        progress.ended(ending(1, 0, 1, status, 0.75, epochs=3))
    # A paused run that goes on ends once.
    progress.ended(ending(2, 1, 0, Status.PAUSED, 0.5, epochs=3))
    progress.ended(ending(2, 1, 0, Status.DONE, 0.5, epochs=9))
    assert file.getvalue().splitlines() == [
        "trial 0 (a=1) stopped at epoch 3: val_accuracy mean 0.5000, std 0.3536, n = 2",
        "run 3/4: trial 1 (a=2) seed 0: val_accuracy 0.5000, 9 epochs, 12.3 s",
    ]


def test_who_goes_on_from_a_rung_is_a_plain_line():
    progress, file = plain(total=8)
    for number, value in ((0, 0.25), (1, 0.75), (2, 0.5)):
        progress.trial(trial(number, a=number))
        for seed in (0, 1):
            progress.ended(ending(2 * number + seed, number, seed, Status.PAUSED, value + seed / 100, epochs=3))
    for seed in (0, 1):
        progress.started(Segment(Run(2 + seed, 1, seed), begin=3), 0)
    assert file.getvalue().splitlines() == [
        "rung at 3 epochs: 3 trials compared, best val_accuracy 0.7550 (trial 1); trial 1 (a=1) continues"
    ]
    alone, file = plain()
    alone.trial(trial(0))
    alone.ended(ending(0, 0, 0, Status.PAUSED, epochs=3))  # an interrupted run is no trial at a rung
    alone.started(Segment(Run(0, 0, 0), begin=3), 0)
    assert file.getvalue() == ""


def test_what_was_recalled_counts_in_silence():
    progress, file = plain(total=4)
    progress.trial(trial(0, a=1))
    progress.recalled(ending(0, 0, 0, value=0.25))
    assert file.getvalue() == ""
    progress.ended(ending(1, 0, 1, value=0.75))
    assert file.getvalue().splitlines() == [
        "run 2/4: trial 0 (a=1) seed 1: val_accuracy 0.7500, 5 epochs, 12.3 s",
        "trial 0 (a=1) done: val_accuracy mean 0.5000, std 0.3536, n = 2",
    ]


def test_plain_lines_are_flushed_and_fit_any_encoding():
    class Flushed(io.TextIOWrapper):
        flushes = 0

        def flush(self):
            self.flushes += 1
            super().flush()

    raw = io.BytesIO()
    file = Flushed(raw, encoding="ascii", write_through=False)
    progress = PlainProgress("genauigkeit", "max", 1, 1, file)
    progress.trial(Trial(0, {"aktivierung": "größer"}))
    progress.note("eins")
    assert raw.getvalue() == b"eins\n"
    progress.ended(ending(0, 0, 0))
    assert file.flushes == 3
    assert b'run 1/1: trial 0 (aktivierung="gr\\xf6\\xdfer") seed 0' in raw.getvalue()


def test_plain_lines_go_to_standard_output(capsys):
    PlainProgress("loss", "min", 1, 1).note("a line")
    assert capsys.readouterr().out == "a line\n"


def test_the_live_table(clock):
    progress, _ = live()
    progress.trial(Trial(0, {"optimizer.learning_rate": 0.001, "model.hidden": [256, 128]}))
    progress.trial(Trial(1, {"optimizer.learning_rate": 1e-5, "model.hidden": 128}))
    progress.trial(Trial(2, {"optimizer.learning_rate": 1e-5, "model.hidden": "[red]x"}))
    clock.now += 60
    progress.ended(ending(2, 1, 0, value=0.5))
    progress.ended(ending(3, 1, 1, value=0.75))
    progress.ended(ending(0, 0, 0, Status.DIVERGED, reason="loss is nan"))
    progress.started(Segment(Run(1, 0, 1)), 0)
    for seed in (0, 1):
        progress.started(Segment(Run(4 + seed, 2, seed)), 3)
    progress.epoch(Run(4, 2, 0), 1, {"val_accuracy": 0.25})
    progress.epoch(Run(5, 2, 1), 2, {"val_accuracy": 0.75})
    assert picture(progress) == [
        "trial  learning_rate  hidden      runs  mean val_accuracy  state",
        "    1  1e-05          128          2/2  0.6250 ± 0.1768    done",
        "    0  0.001          [256, 128]   1/2                     1 running",
        '    2  1e-05          "[red]x"     0/2                     epoch 2: 0.5000, 2 running',
        "3/128 runs done (1 failed), 3 running on 2 ranks, 3 runs/min, 1 min 00 s elapsed, about 41 min 40 s left",
    ]
    progress.close()


def test_what_was_recalled_is_no_measure_of_the_time_left(clock):
    progress, _ = live(total=10, seeds=10)
    progress.trial(trial(0))
    for seed in range(4):
        progress.recalled(ending(seed, 0, seed))
    clock.now += 30
    assert picture(progress)[-1] == "4/10 runs done, 30 s elapsed, unknown time left"
    progress.started(Segment(Run(4, 0, 4)), 0)
    progress.ended(ending(4, 0, 4))
    clock.now += 10
    assert picture(progress)[-1] == "5/10 runs done, 1.5 runs/min, 40 s elapsed, about 3 min 20 s left"
    for seed in range(5, 10):
        progress.ended(ending(seed, 0, seed))
    assert picture(progress)[-1] == "10/10 runs done, 9 runs/min, 40 s elapsed"
    progress.close()


def test_a_failure_that_is_told_twice_counts_once(clock):
    progress, _ = live(total=2, seeds=2)
    progress.trial(trial(0))
    for _ in range(2):
        progress.ended(ending(0, 0, 0, Status.FAILED))
    assert picture(progress)[-1].startswith("1/2 runs done (1 failed), ")
    progress.close()


def test_totals_where_their_number_is_not_known(clock):
    progress, _ = live(total=None, seeds=1)
    progress.trial(trial(0))
    progress.ended(ending(0, 0, 0))
    clock.now += 7500
    assert picture(progress)[-1] == "1 runs done, 0.008 runs/min, 2 h 05 min elapsed"
    progress.close()


@pytest.mark.parametrize(("mode", "order"), [("max", [2, 0, 1]), ("min", [1, 0, 2])])
def test_the_best_come_first(clock, mode, order):
    progress, _ = live(mode=mode)
    for number in range(6):
        progress.trial(trial(number))
    for number, value in ((0, 0.5), (1, 0.25), (2, 0.75)):
        for seed in (0, 1):
            progress.ended(ending(2 * number + seed, number, seed, value=value))
    # The best ever in this mode, but of fewer epochs than the others have had.
    best = 1.0 if mode == "max" else 0.0
    progress.ended(ending(6, 3, 0, Status.PAUSED, best, epochs=1))
    progress.ended(ending(7, 3, 1, Status.PAUSED, best, epochs=1))
    for seed in (0, 1):
        progress.ended(ending(8 + seed, 4, seed, Status.FAILED, value=None))
    assert [int(row[0]) for row in rows(progress)] == [*order, 3, 4]
    states = [" ".join(row[3:]) for row in rows(progress)]
    assert states[3:] == [f"0/2 {best:.4f} ± 0.0000 paused at epoch 1", "2/2 failed"]
    assert "and 1 more trial" in picture(progress)
    progress.close()


def test_states_of_trials_that_wait():
    progress, _ = live(seeds=3)
    progress.trial(trial(0, a=1))

    def state() -> str:
        return " ".join(rows(progress)[0][2:])

    progress.ended(ending(0, 0, 0, Status.PAUSED, 0.25, epochs=1))
    progress.ended(ending(1, 0, 1, Status.FAILED, value=None, epochs=0))
    assert state() == "1/3 0.2500 paused at epoch 1, 1 failed"
    # Only runs that came equally far have a mean.
    progress.ended(ending(2, 0, 2, Status.PAUSED, 0.75, epochs=3))
    assert state() == "1/3 0.7500 paused at epoch 3, 1 failed"
    progress.started(Segment(Run(0, 0, 0), 1, 3), 0)
    assert state() == "1/3 0.7500 epoch 1, 1 running"
    progress.ended(ending(0, 0, 0, Status.PAUSED, 0.25, epochs=3))
    assert state() == "1/3 0.5000 ± 0.3536 paused at epoch 3, 1 failed"
    progress.ended(ending(2, 0, 2, Status.DONE, 0.875, epochs=9))
    assert state() == "2/3 0.8750 paused at epoch 9, 1 failed"
    progress.ended(ending(0, 0, 0, Status.PRUNED, 0.25, epochs=3))
    assert state() == "3/3 0.8750 stopped at epoch 9, 1 failed"
    progress.close()


def test_a_metric_that_is_not_finite_is_in_no_mean():
    progress, _ = live()
    progress.trial(trial(0))
    progress.ended(ending(0, 0, 0, value=float("inf")))
    progress.ended(ending(1, 0, 1, value=0.5))
    assert rows(progress)[0][4:] == ["0.5000", "done"]
    progress.close()


@pytest.mark.parametrize(("height", "room"), [(50, MAX_ROWS), (24, 16), (5, 1)])
def test_the_table_fits_the_terminal(clock, height, room):
    progress, _ = live(height=height)
    for number in range(60):
        progress.trial(trial(number))
    for number in range(30):
        for seed in (0, 1):
            progress.ended(ending(2 * number + seed, number, seed, value=number / 100))
    assert [int(row[0]) for row in rows(progress)] == list(range(29, 29 - room, -1))
    assert f"and {60 - room} more trials" in picture(progress)
    for number in range(30, 60):
        progress.started(Segment(Run(2 * number, number, 0)), 0)
    best = room // 4
    assert [int(row[0]) for row in rows(progress)] == [*range(29, 29 - best, -1), *range(30, 30 + room - best)]
    assert len(picture(progress)) < max(height, 8)
    progress.close()


def test_a_narrow_terminal_cuts_settings_first(clock):
    progress, _ = live(width=60)
    progress.trial(trial(0, a="x" * 40, b=list(range(20))))
    progress.ended(ending(0, 0, 0))
    progress.ended(ending(1, 0, 1))
    lines = picture(progress, width=60)
    assert max(map(len, lines)) <= 60
    assert len(lines) == 3  # no row wraps
    assert lines[1].startswith("    0  xxx")
    assert "…" in lines[1]
    assert "2/2  0.5000 ± 0.0000" in lines[1]


def test_fields_of_one_name_in_two_places_are_told_apart():
    progress, _ = live()
    progress.trial(Trial(0, {"data.name": "mnist", "optimizer.name": "adam", "model.hidden": 8}))
    assert picture(progress)[0].split()[:4] == ["trial", "data.name", "optimizer.name", "hidden"]
    progress.close()


def test_no_drawing_before_its_time(clock):
    progress, file = live()
    progress.trial(trial(0))
    progress.started(Segment(Run(0, 0, 0)), 0)
    output = file.getvalue()
    assert "trial" in output
    for epoch in range(100):
        progress.epoch(Run(0, 0, 0), epoch, {"val_accuracy": 0.5})
    assert file.getvalue() == output
    clock.now += 0.26
    progress.epoch(Run(0, 0, 0), 101, {"val_accuracy": 0.5})
    assert "epoch 101: 0.5000, 1 running" in file.getvalue()[len(output) :]
    progress.close()


def test_drawing_takes_a_small_part_of_the_time(clock, monkeypatch):
    progress, file = live()
    draw = progress._picture

    def slowly():
        clock.now += 1
        return draw()

    monkeypatch.setattr(progress, "_picture", slowly)
    progress.trial(trial(0))
    output = file.getvalue()
    clock.now += 49
    progress.trial(trial(1))
    assert file.getvalue() == output
    clock.now += 2
    progress.trial(trial(2))
    assert len(file.getvalue()) > len(output)
    progress.close()


def test_failures_and_notes_stand_above_the_table(clock):
    progress, file = live(width=60)
    progress.trial(Trial(0, {}))
    progress.note("continuing: [bold]3[/bold] of 128 runs were done")
    reason = "a long reason " * 6
    progress.ended(ending(0, 0, 0, Status.FAILED, value=None, epochs=0, reason=reason))
    assert "continuing: [bold]3[/bold] of 128 runs were done\n" in file.getvalue()
    failure_line = f"run 1/128: trial 0 seed 0: failed after 0 epochs, 12.3 s: {reason.strip()}\n"
    assert failure_line in file.getvalue().replace("\n  ", " ")
    assert failure_line not in file.getvalue(), "60 columns"
    progress.close()


def test_closing_leaves_the_last_table_and_the_terminal(clock):
    before = sys.stdout
    progress, file = live(seeds=1, total=1)
    progress.trial(Trial(0, {}))
    assert sys.stdout is not before  # what others print goes above the table
    progress.ended(ending(0, 0, 0))
    assert "1/1 runs done" not in file.getvalue()
    progress.close()
    assert sys.stdout is before
    closed = file.getvalue()
    assert "1/1 runs done, 0 s elapsed" in closed
    assert closed.rindex("\x1b[?25h") > closed.rindex("\x1b[?25l")  # the cursor is back
    progress.close()
    progress.trial(Trial(1, {}))
    assert file.getvalue() == closed
    assert sys.stdout is before


def test_an_exception_leaves_the_terminal_usable(monkeypatch):
    before = sys.stdout
    progress, file = live()
    progress.trial(trial(0))

    def fail():
        raise KeyError("planted")

    monkeypatch.setattr(progress, "_picture", fail)
    with pytest.raises(KeyError, match="planted"):
        progress.close()
    assert sys.stdout is before
    assert file.getvalue().endswith("\x1b[?25h")


def test_closing_what_never_began_shows_nothing():
    progress, file = live()
    progress.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, PlainProgress),
        ({"live": True}, LiveProgress),
        ({"quiet": True}, Progress),
        ({"quiet": True, "live": True}, Progress),
    ],
)
def test_which_one(options, kind):
    file = io.StringIO()
    progress = make_progress("val_accuracy", "max", 2, 1, file=file, **options)
    assert type(progress) is kind
    everything(progress)
    assert ("2/2" in file.getvalue()) == (kind is not Progress)
    assert (file.getvalue() == "") == (kind is Progress)


def test_no_table_is_drawn_into_a_file(tmp_path):
    with (tmp_path / "log").open("w+", encoding="utf-8") as file:
        progress = make_progress("val_accuracy", "max", 2, 1, live=True, file=file)
        assert type(progress) is PlainProgress
        everything(progress)
        file.seek(0)
        assert "\x1b" not in file.read()


def test_nothing_is_shown_if_quiet(capfd):
    everything(make_progress("val_accuracy", "max", 2, 1, quiet=True))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def everything(progress: Progress) -> None:
    """Call everything there is."""
    try:
        progress.trial(trial(0))
        progress.trial(trial(1))
        progress.note("a note")
        progress.recalled(ending(0, 0, 0))
        progress.started(Segment(Run(1, 1, 0)), 0)
        progress.epoch(Run(1, 1, 0), 1, {"val_accuracy": 0.5})
        progress.ended(ending(1, 1, 0, Status.FAILED, reason="a reason"))
        progress.ended(ending(1, 1, 0, Status.FAILED, reason="a reason"))  # told twice, counted once
    finally:
        progress.close()
