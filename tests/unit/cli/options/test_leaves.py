"""What a field says of itself fits together, and decides what commands do with it."""

import dataclasses

import pytest

from dptrain.cli.commands.sweep import field_path
from dptrain.cli.main import COMMANDS
from dptrain.cli.options.config import (
    Config,
    compile_options,
    deciding,
    leaves,
    remove_fields,
    to_dict,
    value_at,
    without_later,
)
from dptrain.cli.run_records import is_about_training
from dptrain.errors import ConfigError
from dptrain.models import Model

LEAVES = list(leaves())
PATHS = {leaf.path for leaf in LEAVES}


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_what_a_field_says_fits_together(leaf):
    assert set(leaf.shown_in) <= {*COMMANDS}
    assert not (leaf.about_job and leaf.decides)
    assert not (leaf.decides and leaf.sweep_ignores) or leaf.path in (
        "seed",
        "comm_dtype",
    )  # of which a sweep has others
    if leaf.about_job:
        assert leaf.sweeps_refuse is not None
    assert is_about_training(leaf.path) == (not leaf.about_job)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_a_sweep_varies_what_is_not_refused(leaf):
    if leaf.sweeps_refuse is None:
        assert field_path(leaf.path, Config()) == leaf.path
    else:
        with pytest.raises(ConfigError) as error:
            field_path(leaf.path, Config())
        assert str(error.value) == f"field {leaf.path!r} cannot be swept: {leaf.sweeps_refuse}"


def test_what_decides_on_resuming_is_what_says_so():
    """Apart from fields of later versions that have their defaults, and what is computed from others."""
    decisive = deciding(Config())
    expected = {leaf.path for leaf in LEAVES if leaf.decides and not leaf.later} - {"train.epochs"}
    found = {leaf.path for leaf in LEAVES if _has(decisive, leaf.path)}
    assert found == expected


def test_options_of_compile_are_its_keywords():
    import inspect

    keywords = inspect.signature(Model.compile).parameters
    options = compile_options(Config())
    assert options.keys() <= keywords.keys()
    optimizer_loss_and_metrics = ["self", "optimizer", "loss", "loss_weights", "metrics", "weighted_metrics"]
    assert keywords.keys() - options.keys() == {*optimizer_loss_and_metrics, "auto_scale_loss"}
    assert options["device_mb"] == Config().data.device_mb
    chosen = dataclasses.replace(Config(), gemm="auto", stages=3)
    assert {name: compile_options(chosen)[name] for name in ("gemm", "stages")} == {"gemm": "auto", "stages": 3}


def test_paths_are_left_out_with_sections_that_become_empty():
    tree = to_dict(Config())
    left = remove_fields(
        tree, [path for path in PATHS if path.startswith("logging.") or path in ("seed", "model.arguments")]
    )
    assert {path for path in PATHS if _has(left, path)} == {
        path for path in PATHS if not path.startswith("logging.") and path not in ("seed", "model.arguments")
    }
    assert tree == to_dict(Config())
    assert "conv" in without_later(tree)
    assert "conv" not in without_later(tree, sections_only=False)


def _has(tree, path):
    try:
        value_at(tree, path)
    except (KeyError, TypeError):
        return False
    return True
