"""What the command line answers to words that it does not know."""

import pytest

from dptrain.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--learning-rat 1", "unknown '--learning-rat'; did you mean '--learning-rate'"),
        ("--epoch 3", "unknown '--epoch'; did you mean '--epochs'"),
        ("--epoch=3", "unknown '--epoch=3'; did you mean '--epochs'"),
        ("--optimizer.lerning_rate 1", "; did you mean '--optimizer.learning_rate'"),
        ("swep", "unknown command 'swep'; did you mean 'sweep'"),
        ("sweep --gird hidden=3,4", "unknown '--gird'; did you mean '--grid'"),
        ("sweep --metri loss", "unknown '--metri'; did you mean '--metric'"),
        ("doctor --devic cpu", "unknown '--devic'; did you mean '--device'"),
        ("train 7", "unknown '7'"),
    ],
)
def test_a_word_that_is_nearly_right_is_not_taken_but_answered(capfd, arguments, message):
    assert main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("dptrain: ")
    assert err.count("\n") == 1
    assert message in err
