"""YAML that anybody may have written."""

import pytest

from dptrain.errors import ConfigError
from dptrain.runtime.storage.yaml_files import parse_mapping, read_mapping


def test_nesting_has_an_end():
    """Without one a kilobyte of brackets takes seconds."""
    assert parse_mapping("a: " + "[" * 100 + "]" * 100, "x")
    with pytest.raises(ConfigError, match="x: nested too deeply"):
        parse_mapping("a: " + "[" * 101 + "]" * 101, "x")


def test_aliases_are_counted_written_out():
    aliases = ", ".join(["*a"] * 98)
    assert parse_mapping(f"a: &a [{', '.join('x' * 999)}]\nb: [{aliases}]", "x")
    with pytest.raises(ConfigError, match="x, line 1: more than 100000 values, aliases written out"):
        parse_mapping(f"a: &a [{', '.join('x' * 999)}]\nb: [{aliases}, *a]", "x")


def test_a_file_has_an_end(tmp_path):
    (tmp_path / "file").write_text("a: 1 #" + "x" * (1 << 18))
    with pytest.raises(ConfigError, match=r"--plan .*file: more than 262144 bytes; is it the right file"):
        read_mapping(tmp_path / "file", "--plan")
