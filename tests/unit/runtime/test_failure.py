"""Exit codes and one-line messages."""

import pytest

from dptrain.errors import ConfigError, DataError, DeviceError, DivergenceError, OutputError
from dptrain.runtime import failure
from dptrain.runtime.failure import Phase, describe, exit_code_of, report


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 65),
        (DeviceError("x"), 69),
        (OutputError("x"), 74),
        (DivergenceError("x"), 76),
        (RuntimeError("x"), 70),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 69),
        (SystemExit(5), 5),
        (SystemExit(None), 0),
        (SystemExit("text"), 1),
    ],
)
def test_exit_codes(error, code):
    assert exit_code_of(error) == code


def test_unknown_errors_of_a_users_script_have_pythons_code():
    assert exit_code_of(ValueError("x"), unknown=1) == 1
    assert exit_code_of(DataError("x"), unknown=1) == 65


def test_one_line_with_the_place():
    with pytest.raises(ValueError, match="two") as caught:
        raise ValueError("two\nlines")
    assert describe(caught.value).startswith("ValueError: two lines (test_failure.py:")
    assert describe(DataError("a\n  b")) == "a b"
    assert describe(MemoryError()) == "MemoryError"


def test_phase_in_words():
    phase = Phase()
    assert str(phase) == "start-up"
    phase.enter("training")
    phase.epoch, phase.step = 2, 17
    assert str(phase) == "training, epoch 2, step 17"
    phase.enter("saving")
    assert str(phase) == "saving"


def test_a_phase_that_has_failed_is_over_for_the_other_ranks():
    """Its name stays, for the message of the failure, which a user may catch."""
    phase = Phase()
    phase.enter("fit")
    phase.fail()
    assert (str(phase), phase.for_others) == ("fit", "user code")
    phase.enter("evaluate")
    assert (str(phase), phase.for_others) == ("evaluate", "evaluate")


def test_a_phase_within_another_ends_where_it_ends_well():
    phase = Phase("training")
    phase.step = 3
    with phase.during("saving"):
        assert str(phase) == "saving, step 3"
    assert str(phase) == "training, step 3"
    with pytest.raises(ValueError, match="x"), phase.during("saving"):
        raise ValueError("x")
    assert str(phase) == "saving, step 3", "which the message of the failure tells"


def test_report_with_and_without_a_launcher(capsys, monkeypatch):
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    report(DataError("broken"))
    assert capsys.readouterr().err == "dptrain: broken\n"
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    failure.phase.enter("data")
    report(DataError("broken"))
    line = capsys.readouterr().err
    assert line.startswith("dptrain: rank 2/4 host ")
    assert line.endswith(" data: broken\n")
    assert " pid " in line
