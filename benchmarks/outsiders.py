"""Hostile inputs that came after `damages.py`: Parquet, folders beside a run, pictures, a model's folder, settings.

`hostile.py --outsiders` draws from these. A damage is what it is in `damages.py`.
"""

import json
import os
import random
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from damages import Arena, Unfit, code, flipped, garbled, linked, piped, replaced, sparse, truncated, values

Damage = Callable[[Arena, Path, random.Random], None]

# What may happen to any file, with weights.
BYTES: Mapping[str, tuple[int, Damage]] = {
    "bytes": (2, garbled),
    "bit": (1, flipped),
    "end": (1, truncated),
    "other content": (1, replaced),
    "link": (2, linked),
    "pipe": (1, piped),
    "sparse": (1, sparse),
}

# Bytes of a value that a dictionary page holds once and a column a million times: 10 GB in a few kilobytes.
_VALUE, _ROWS = 10_000, 1_000_000
# Modules that dptrain imports late, or where an extra is installed.
LIBRARIES = ("filelock", "h5py", "yaml", "matplotlib", "optuna", "pyarrow", "pandas", "PIL", "safetensors", "rich")


def in_parquet(arena: Arena, path: Path, rng: random.Random) -> None:
    """A Parquet file that asks for memory, whose metadata or names are hostile, or whose types nobody expects."""
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(path)
    match rng.randrange(6):
        case 0:
            kind = rng.choice((pa.binary(), pa.string()))
            value = pa.array([b"x" * _VALUE]).cast(kind)
            column = pa.DictionaryArray.from_arrays(pa.array([0] * _ROWS, pa.int32()), value)
            table = pa.table({"age": column, "target": pa.array([0.0] * _ROWS)})
            parquet.write_table(table, path, store_schema=False, compression="zstd")
        case 1:
            parquet.write_table(table.replace_schema_metadata({b"pandas": _metadata(arena, rng)}), path)
        case 2:
            names = [*code(arena), "\0", "x" * 100_000, "\x1b]0;owned\x07", "../outside/canary.txt", "target"]
            parquet.write_table(table.rename_columns([rng.choice(names) for _ in table.column_names]), path)
        case 3:
            parquet.write_table(pa.table({str(number): [0.0] for number in range(rng.choice((0, 1, 20_000)))}), path)
        case 4:
            odd = [
                pa.array([[1], None, []] * 20),
                pa.array([{"a": 1}] * 60),
                pa.array([2**62] * 60, pa.timestamp("us")),
                pa.array([10**30] * 60, pa.decimal128(38)),
                pa.nulls(60),
                pa.array([float("nan"), float("inf"), -0.0] * 20),
            ]
            parquet.write_table(table.set_column(rng.randrange(3), table.column_names[0], rng.choice(odd)), path)
        case _:
            texts = [value for value in values(arena) if isinstance(value, str)]
            cities = pa.array([rng.choice(texts) for _ in range(table.num_rows)])
            parquet.write_table(table.set_column(1, "city", cities), path)


def _metadata(arena: Arena, rng: random.Random) -> bytes:
    """Return a text in place of pandas' description of the columns."""
    index = rng.choice(
        [5, None, "age", ["age", 7], [{"kind": "range", "start": 0, "stop": 10**12, "step": 0}], values(arena)]
    )
    columns = rng.choice([5, [], [{}], [{"name": 3, "pandas_type": "object"}], [{"name": "age", "numpy_type": "exec"}]])
    described = {"index_columns": index, "columns": columns, "column_indexes": rng.choice([None, [], [{"name": []}]])}
    texts = [b"{", b"null", b"[]", b"[" * 100_000, b'{"index_columns": ' + b"9" * 5000 + b"}", b"\xff\xfe"]
    return rng.choice([*texts, json.dumps(described, default=str).encode()])


def neighbour(arena: Arena, path: Path, rng: random.Random) -> None:
    """Beside a sound run lies another folder, of which nothing can be trusted."""
    source, names = path.parent, [b"other", b"\xff\xfe", b"a\nb", b"\x1b]0;owned\x07", b"=1+1", b"-rf"]
    folder = os.path.join(os.fsencode(path.parents[1]), rng.choice(names))
    if rng.random() < 0.2:
        os.symlink(rng.choice((folder, b".", os.fsencode(arena.outside))), folder)
        return
    os.mkdir(folder)
    texts = {path.name: path.read_text() for path in source.iterdir() if path.suffix in (".json", ".jsonl", ".yaml")}
    number = rng.choice(
        ["9" * 400, "1e308", "-1e308", "1e999", "NaN", "9" * 5000, json.dumps(rng.choice(values(arena)), default=str)]
    )
    for name, text in texts.items():
        with open(os.path.join(folder, name.encode()), "w", errors="surrogatepass") as file:
            file.write(_altered(text, number, rng))


def _altered(text: str, number: str, rng: random.Random) -> str:
    match rng.randrange(5):
        case 0:  # a number, wherever one stands
            return re.sub(r"(?<=: )\d+(\.\d+)?", lambda match: number if rng.random() < 0.3 else match[0], text)
        case 1:
            return text.replace("20", "+3000", 1)  # a year
        case 2:
            return "a: &a [x, x, x, x]\nb: [" + "*a, " * 200_000 + "x]\n" + text
        case 3:
            return text + "[" * 20_000
        case _:
            return text


def in_picture(arena: Arena, path: Path, rng: random.Random) -> None:
    """A PNG that declares a large picture, holds texts and profiles that nobody needs, or ends in a row."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    side = rng.choice((0, 1, 8, 30_000, 2**31 - 1))
    header = struct.pack(
        ">IIBBBBB", side, side, rng.choice((8, 16, 3)), rng.choice((2, 0, 3, 9)), 0, 0, rng.choice((0, 1, 7))
    )
    rows = zlib.compress(b"\0" * min(side * 3 + 1, 1000) * min(side, 1000))
    extra = rng.choice(
        [
            b"",
            chunk(b"tEXt", b"Comment\0" + rng.choice(code(arena)).encode() * 1000),
            chunk(b"iCCP", b"x\0\0" + zlib.compress(b"\0" * 50_000_000)),
        ]
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def around_a_picture(arena: Arena, path: Path, rng: random.Random) -> None:
    """Links among pictures that lead to themselves, above or out, and names that are no text."""
    names = [b"loop", b"\xff.png", b"\x1b]0;owned\x07.png", b"a\nb.png", b".hidden.png"]
    place = os.path.join(os.fsencode(rng.choice((path.parent, path.parents[1]))), rng.choice(names))
    if rng.random() < 0.5:
        os.symlink(rng.choice((place, b".", b"..", os.fsencode(arena.outside))), place)
    else:
        Path(os.fsdecode(place)).write_bytes(path.read_bytes())


def library_beside(arena: Arena, path: Path, rng: random.Random) -> None:
    """Beside a user's model lie modules with the names of libraries, to be imported in their place."""
    for name in rng.sample(LIBRARIES, 3):
        evil = f"open({str(arena.executed)!r}, 'w')\nraise ImportError\n"
        if rng.random() < 0.3:
            (path.parent / name).mkdir()
            (path.parent / name / "__init__.py").write_text(evil)
        else:
            (path.parent / f"{name}.py").write_text(evil)


def in_settings(arena: Arena, path: Path, rng: random.Random) -> None:
    """Numbers of thousands of digits, aliases and depths in YAML."""
    text = path.read_text()
    lines = [number for number, line in enumerate(text.splitlines()) if line.rpartition(": ")[2].strip()]
    if not lines:
        raise Unfit
    content = text.splitlines()
    place = rng.choice(lines)
    hostile = [
        "9" * 4300,
        "9" * 5000,
        "-" + "9" * 100_000,
        "1e9999",
        "0x" + "f" * 5000,
        "1:" * 3000 + "1",
        "[" * 3000,
        "2" * 4299,
    ]
    content[place] = f"{content[place].rpartition(': ')[0]}: {rng.choice(hostile)}"
    path.write_text("\n".join(content))


PARQUET: Mapping[str, tuple[int, Damage]] = {"Parquet": (10, in_parquet), **BYTES}
NEIGHBOUR: Mapping[str, tuple[int, Damage]] = {"neighbour": (1, neighbour)}
PICTURE: Mapping[str, tuple[int, Damage]] = {
    "picture": (5, in_picture),
    "links and names": (4, around_a_picture),
    **BYTES,
}
LIBRARY: Mapping[str, tuple[int, Damage]] = {"library beside": (1, library_beside)}
SETTINGS: Mapping[str, tuple[int, Damage]] = {"settings": (1, in_settings)}
