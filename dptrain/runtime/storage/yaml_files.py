"""Reads untrusted YAML: of bounded size, without repeated keys, and without alias bombs."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from dptrain.errors import ConfigError
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line

# Most bytes of a file: far above any plan of a sweep, and read in seconds.
MAX_BYTES, _MAX_VALUES, _MAX_DEPTH, _MAX_BITS = 1 << 18, 100_000, 100, 4096


def read_mapping(path: Path, option: str) -> dict[str, Any]:
    """Return the mapping in a YAML (or JSON) file, empty for an empty file."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{option} {path}: more than {MAX_BYTES} bytes; is it the right file?")
    return parse_mapping(text, f"{option} {path}")


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """Return the mapping in a YAML (or JSON) text; bound its size first: YAML takes seconds a megabyte."""
    try:
        tree = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {getattr(error, 'problem', None) or 'not YAML'}") from error
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except Exception as error:  # PyYAML's converters raise what int(), float() and their own slips raise
        raise ConfigError(f"{where}: not YAML ({one_line(error)[:100]})") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected keys and values")
    return tree or {}


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses alias bombs and repeated keys, where plain YAML keeps the last."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _MAX_DEPTH:  # each level makes every token slower
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not a string", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _whole_number(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    number: int = loader.construct_yaml_int(node)
    if number.bit_length() > _MAX_BITS:  # Python prints none of more than 4,300 digits
        raise yaml.constructor.ConstructorError(None, None, "an integer with too many digits", node.start_mark)
    return number


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _count(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Return a document's number of values with aliases expanded; refuse too many, and recursion."""
    if node not in counted:
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [child for pair in inner for child in (pair if isinstance(pair, tuple) else (pair,))]
        counted[node] = 1 + sum(_count(child, counted) for child in flat)
        if counted[node] > _MAX_VALUES:
            text = f"more than {_MAX_VALUES} values, aliases written out"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    return counted[node]
