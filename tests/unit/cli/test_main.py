"""What the command line answers to words that it does not know."""

import gc
import sys

import pytest

from dptrain.cli.main import main
from tests.conftest import ROOT
from tests.launching import run


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
        ("train 7", "unknown '7'; options begin with --, and a command comes first"),
        ("--epochs 3 sweep", "unknown 'sweep'; options begin with --, and a command comes first"),
        ("sweep --grid hidden=8,16 dropout=0,0.2", "unknown 'dropout=0,0.2'; repeat --grid: --grid dropout=0,0.2"),
        ("sweep --seeds 0-1 dropout=0,0.2", "unknown 'dropout=0,0.2'; repeat --grid: --grid dropout=0,0.2"),
        ("train dropout=0", "unknown 'dropout=0'; options begin with --, and a command comes first"),
        ("--lr 1e-3", "unknown '--lr'; did you mean '--learning-rate'?"),
        ("--optimizer.lr 1e-3", "unknown '--optimizer.lr'; did you mean '--optimizer.learning_rate'?"),
        ("--num_epochs 3", "did you mean '--epochs'?"),
        ("--warmup-epochs 2", "unknown '--warmup-epochs'; did you mean '--schedule'?"),
        ("--beta1 0.5", "did you mean '--optimizer.beta_1'?"),
        ("--gpus 4", "unknown '--gpus'; mpirun sets the number of ranks: mpirun -n 4 python -m dptrain"),
        ("-n 4", "mpirun sets the number of ranks"),
        ("sweep --random-state 7", "did you mean '--seed'?"),
        ("launch --np 4 -- true", "did you mean '--ranks'?"),
        ("tune", "unknown command 'tune'; did you mean 'sweep'?"),
        ("swep --help", "unknown command 'swep'"),
        ("help trian", "unknown command 'trian'; did you mean 'train'?"),
        ("script.py", "unknown command 'script.py'; python -m dptrain launch -n 4 -- python script.py runs a script"),
    ],
)
def test_a_word_that_is_nearly_right_is_not_taken_but_answered(capfd, arguments, message):
    assert main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("dptrain: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("help", "usage: python -m dptrain "),
        ("help launch", "usage: python -m dptrain launch "),
        ("help sweep", "--grid"),
    ],
)
def test_help_is_a_command_too(capfd, arguments, shown):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 0
    assert shown in capfd.readouterr().out


def test_help_of_a_command_is_its_own(capfd):
    outputs = {}
    for command in ("train", "sweep", "doctor", "launch"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        outputs[command] = capfd.readouterr().out
    assert outputs["sweep"].startswith("usage: python -m dptrain sweep [options]\n")
    assert outputs["doctor"].startswith("usage: python -m dptrain doctor [options]\n")
    assert "--epochs" in outputs["sweep"]
    assert "--epochs" not in outputs["doctor"]
    assert "--device" in outputs["doctor"]
    assert "--grid FIELD" not in outputs["train"] + outputs["doctor"]
    assert "(default: )" not in "".join(outputs.values())


def test_options_that_the_help_of_a_command_leaves_out_are_taken(capfd):
    assert main(["doctor", "--epochs", "3", "--print-config"]) == 0
    assert "epochs: 3" in capfd.readouterr().out


def test_garbage_is_collected_from_where_everything_is_imported(tmp_path, capfd, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    gc.disable()  # as `dptrain.__main__` does, which also takes the signals of whoever imports it
    try:
        assert main(["runs", str(tmp_path)]) == 0
    finally:
        enabled = gc.isenabled()
        gc.enable()
    assert frozen == [False]
    assert enabled


def test_ctrl_c_in_code_that_python_writes_itself_ends_with_its_code(tmp_path):
    """Where one left an `exec` of text, Python would end itself by SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\nimport dptrain.__main__ as command\n"
        "def main(argv):\n"
        "    try:\n        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n        return 130\n"
        "command.cli.main = main\nsys.exit(command.main([]))\n"
    )
    assert run([sys.executable, "-m", "interrupted"], cwd=tmp_path, PYTHONPATH=str(ROOT)).code == 130
