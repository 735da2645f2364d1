"""Configuration: defaults, file, command line, and what is refused."""

import os
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dptrain.cli.options.config import (
    Config,
    OptimizerConfig,
    deciding,
    fixed_shards,
    leaves,
    read_file,
    resolve,
    to_dict,
    to_yaml,
    verbosity,
)
from dptrain.errors import ConfigError


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_are_the_default_model():
    config = resolve({}, "-", {})
    assert config == Config()
    assert config.model.hidden == (128,)
    assert (config.train.batch_size, config.train.epochs, config.optimizer.name) == (128, 5, "adam")


def test_file_below_command_line():
    file = {"train": {"epochs": 7, "batch_size": 64}, "seed": 3}
    config = resolve(file, "f", {"train.epochs": "9", "optimizer.learning_rate": "1e-2"})
    assert (config.train.epochs, config.train.batch_size, config.seed) == (9, 64, 3)
    assert config.optimizer.learning_rate == 0.01
    assert file == {"train": {"epochs": 7, "batch_size": 64}, "seed": 3}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [("128,64", (128, 64)), ("32", (32,)), ("", ()), (" 4, 5 ", (4, 5)), ([7, 8], (7, 8)), (9, (9,))],
)
def test_hidden_sizes(text, hidden):
    assert resolve({"model": {"hidden": text}}, "f", {}).model.hidden == hidden


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optimizer.learning_rate", "nan", "finite"),
        ("train.validation_split", "1", "less than 1"),
        ("train.fold", "6/5", "expected a fold and the number of folds, such as 2/5"),
        ("train.fold", "1/1", "expected a fold and the number of folds"),
        ("train.fold", "0.2", "expected a fold and the number of folds"),
        ("optimizer.learning_rate", "0", "greater than 0"),
        ("optimizer.beta_1", "1", "less than 1"),
        ("optimizer.clipnorm", "0", "greater than 0"),
        ("optimizer.weight_decay", "-1", "greater than or equal to 0"),
        ("optimizer.gradient_accumulation_steps", "1", "greater than or equal to 2"),
        ("train.epochs", "-1", "greater than or equal to 0"),
        ("train.epochs", "2.5", "must be a whole number"),
        ("train.batch_size", "many", "must be a whole number"),
        ("model.hidden", "128,x", "must be a whole number"),
        ("model.hidden", "0", "greater than or equal to 1"),
        ("model.dropout", "1.0", "less than 1"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("data.sharding", "both", "'global' or 'static'"),
        ("comm_dtype", "float8", "'bfloat16' or 'float16'"),
        ("train.drop_last", "perhaps", "must be on or off"),
        ("comm", "ipc", "must be 'host', 'cuda-aware', 'nccl' or 'auto'"),
        ("verbose", "3", "0, 1 or 2"),
        ("seed", "-1", "greater than or equal to 0"),
        ("train.epochs", "10000000000", "less than or equal to 2147483647"),
        ("train.batch_size", "10000000000", "less than or equal to 2147483647"),
        ("model.hidden", "128,10000000000", "less than or equal to 2147483647"),
        ("optimizer.gradient_accumulation_steps", "10000000000", "less than or equal to 2147483647"),
        ("bucket_mb", "1e305", "less than or equal to 1000000000"),
        ("data.device_mb", "1e305", "less than or equal to 1000000000"),
        ("data.max_bytes", "10000000000000000000", "less than 9223372036854775808"),
        ("checkpoint.every", "5,often", "expected a number of steps, epoch, seconds such as 600s, or none"),
        ("checkpoint.every", "0", "expected a number of steps"),
        ("checkpoint.keep", "0", "greater than or equal to 1"),
    ],
)
def test_bad_values_name_key_value_range_and_place(path, value, expected):
    with pytest.raises(ConfigError) as caught:
        resolve({}, "-", {path: value})
    text = str(caught.value)
    assert text.startswith(f"{path} = {value!r}, set on the command line: ")
    assert expected in text
    assert "\n" not in text

    section, _, key = path.rpartition(".")
    with pytest.raises(ConfigError, match=r"set in my\.yaml: ") as caught:
        resolve({section: {key: value}} if section else {key: value}, "my.yaml", {})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer:\n  learing_rate: 1\n", "unknown 'optimizer.learing_rate'; did you mean 'learning_rate'?"),
        ("optimizer:\n  lr: 1\n", "unknown 'optimizer.lr'; did you mean 'learning_rate'?"),
        ("lr: 1\n", "unknown 'lr'; did you mean 'optimizer.learning_rate'?"),
        ("batch_size: 32\n", "unknown 'batch_size'; did you mean 'train.batch_size'?"),
        ("trian: {}\n", "unknown 'trian'; did you mean 'train'?"),
        ("seed: 1\nseed: 2\n", "line 2: key 'seed' appears twice"),
        ("train: 5\n", "expected keys and values under 'train'"),
        ("- a\n- b\n", "expected keys and values"),
        ("a: [1\n", "line 2: "),
        ("!!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        read_file(file_with(tmp_path, text))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: " + "9" * 5000, "4300 digits"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: &a [*a]", "nested too deeply"),
        ("{[1]: 2}", "line 1: a key that is not a string"),
        ("{{a: 1}: 2}", "line 1: a key that is not a string"),
        ("a: 2024-99-99", "not YAML (month must be"),
        ("a: !!bool maybe", "not YAML ("),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            "more than 100000 values, aliases written out",
        ),
        ("#" * 300_000, "more than 262144 bytes"),
    ],
)
def test_hostile_files(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        read_file(file_with(tmp_path, text))
    assert str(caught.value).startswith(f"--config {tmp_path / 'config.yaml'}")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_values_are_not_repeated_at_length():
    with pytest.raises(ConfigError) as caught:
        resolve({}, "-", {"train.epochs": "9" * 5000})
    assert len(str(caught.value)) < 400


def test_aliases_are_allowed(tmp_path):
    assert read_file(file_with(tmp_path, "seed: &n 3\ntrain: {epochs: *n}")) == {"seed": 3, "train": {"epochs": 3}}


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a character device")):
        with pytest.raises(ConfigError, match=f"{path}: it is {kind}, expected a regular file"):
            read_file(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_file(tmp_path)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.yaml")
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_file(path)


def test_empty_file_is_the_defaults(tmp_path):
    assert read_file(file_with(tmp_path, "")) == {}


@given(
    hidden=st.lists(st.integers(1, 5000), max_size=4),
    rate=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63 - 1),
    name=st.one_of(st.none(), st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)),
)
def test_saved_configuration_repeats_the_run(hidden, rate, seed, name):
    if name is not None and name.lower() in ("none", "null"):
        name = "run"
    config = resolve(
        {"model": {"hidden": hidden}, "optimizer": {"learning_rate": rate}, "seed": seed, "name": name}, "-", {}
    )
    assert resolve(yaml.safe_load(to_yaml(config)), "-", {}) == config


def test_every_leaf_is_in_the_saved_file():
    tree = to_dict(Config())
    for leaf in leaves():
        value = tree
        for key in leaf.path.split("."):
            value = value[key]
        assert leaf.help


def test_every_optimizer_can_be_chosen():
    from dptrain.optimizers import OPTIMIZERS

    assert get_args(OptimizerConfig.__annotations__["name"]) == tuple(OPTIMIZERS)


def test_flags_are_unique():
    flags = [leaf.flag for leaf in leaves() if leaf.flag]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "auto"),
        ({"verbose": 0}, 0),
        ({"verbose": 2}, 2),
        ({"progress": "live"}, 1),
        ({"progress": "lines"}, 2),
        ({"progress": "none"}, 0),
        ({"progress": "lines", "verbose": 2}, 2),
    ],
)
def test_verbosity(options, expected):
    assert verbosity(resolve(options, "-", {})) == expected


def test_verbose_and_progress_must_not_differ():
    config = resolve({"verbose": 0}, "-", {"progress": "live"})
    message = r"^verbose = 0 and progress = 'live': set one of them \(--verbose none unsets it\)$"
    with pytest.raises(ConfigError, match=message):
        verbosity(config)


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({}, None),
        ({"reproducible": "true"}, 8),
        ({"reproducible": "true", "batch_size": "5"}, 5),
        ({"reproducible": "true", "shards_per_batch": "12"}, 12),
        ({"shards_per_batch": "3"}, 3),
    ],
)
def test_reproducible_fixes_the_shards(settings, shards):
    config = resolve({}, "-", {f"train.{name}": value for name, value in settings.items()})
    assert fixed_shards(config) == shards
    assert deciding(config)["train"]["shards_per_batch"] == shards
    assert "reproducible" not in deciding(config)["train"]


def test_checkpoints_without_a_later_field_still_resume():
    decisive = {section: " ".join(deciding(Config())[section]) for section in ("model", "optimizer", "train")}
    assert decisive == {
        "model": "network augment hidden activation dropout",
        "optimizer": "name learning_rate beta_1 beta_2 amsgrad rho initial_accumulator_value centered momentum "
        "nesterov epsilon weight_decay clipnorm clipvalue global_clipnorm gradient_accumulation_steps",
        "train": "batch_size steps_per_epoch drop_last shuffle shards_per_batch on_nonfinite skip_outliers "
        "validation_split fold class_weight",
    }, "a new field of these sections refuses every earlier checkpoint: add it to _LATER with its default"


@pytest.mark.parametrize(("word", "decides"), [("none", {}), ("float16", {"comm_dtype": "float16"})])
def test_gradients_in_half_precision_decide(word, decides):
    """Of checkpoints of earlier versions nothing was rounded, and nothing is said."""
    decisions = deciding(resolve({}, "-", {"comm_dtype": word}))
    assert {name: value for name, value in decisions.items() if name == "comm_dtype"} == decides
