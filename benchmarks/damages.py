"""What an attacker may do to a file that a user is to open: bytes, structure, values, and what lies in its place.

A damage is a function of an `Arena`, a file and a random generator. It changes the file, or says that it has nothing to
do there (`Unfit`). Who changes values inside a format with a checksum computes the checksum anew: attackers can.
"""

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import socket
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import damaged

# Text that only the arena's own files hold: it must not be read and passed on.
SECRET = "canary-5f0c7e1d"


class Unfit(Exception):  # noqa: N818
    """The damage does not fit the file."""


@dataclass(frozen=True)
class Arena:
    """A folder with one input and what it must not touch.

    inside/     the input, which belongs to the attacker
    outside/    canary.txt and others, which belong to the user
    executed    created if code of the input is executed
    """

    folder: Path

    @property
    def inside(self) -> Path:
        """Where the input lies."""
        return self.folder / "inside"

    @property
    def outside(self) -> Path:
        """What nobody may touch."""
        return self.folder / "outside"

    @property
    def executed(self) -> Path:
        """What code of the input would create."""
        return self.folder / "executed"

    def prepare(self) -> None:
        """Make an empty `inside`, and the canaries."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("inside", "temporary", "outside/checkpoints/000001-step-4"):
            (self.folder / name).mkdir(parents=True)
        for name in ("canary.txt", "config.yaml", "model.keras", "lock", "checkpoints/000001-step-4/manifest.json"):
            (self.outside / name).write_text(f"{SECRET}\n")
        (self.outside / "canary.txt").chmod(0o640)

    def canaries(self) -> list[tuple[Any, ...]]:
        """Return what can be known of all that is neither `inside` nor temporary."""
        facts = []
        for path in sorted([self.outside, *self.outside.rglob("*"), *self.folder.iterdir()]):
            if path not in (self.inside, self.folder / "temporary"):
                status = path.lstat()
                content = path.read_bytes() if path.is_file() else b""
                facts.append((str(path), status.st_mode, status.st_ino, status.st_mtime_ns, status.st_size, content))
        return facts


class Opened:
    """Pickled, what runs code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        """Return what creates the file."""
        return os.mkdir, (str(self.path),)


def code(arena: Arena) -> list[str]:
    """Return texts that would create `executed`, if anybody took them for code."""
    touch = f"touch {arena.executed}"
    return [
        f"__import__('os').system('{touch}')",
        f"$({touch})",
        f"`{touch}`",
        f"; {touch} #",
        f"| {touch}",
        f'0ULL,0,0,0,0); (void)::system("{touch}"); //',
        f'1; }} __attribute__((constructor)) void e() {{ system("{touch}"); }} //',
        f"!!python/object/apply:os.system ['{touch}']",
        f"{arena.inside}/evil.py:build_model",
        "evil.py:build_model",
        "evil:build_model",
        "os.system",
        "builtins.exec",
        "{0.__class__.__init__.__globals__}",
        f'<img src=x onerror="{touch}">',
    ]


def values(arena: Arena) -> list[Any]:
    """Return values that nobody expects."""
    deep: Any = 0
    for _ in range(500):
        deep = [deep]
    up = "../" * 8
    outside = str(arena.outside / "canary.txt")
    places = [outside, f"{up}{outside}", "../outside/canary.txt", "../outside", "..", ".", "/etc/hostname", "/dev/zero"]
    texts = ["", "\0", "\x1b]0;owned\x07\x1b[2J\x1b[31m", "\r\n\u202e", "x" * 300_000, "%n%s%d", "nan", "é" * 200, "/"]
    numbers = [
        0,
        -1,
        1,
        2**31,
        2**32 + 1,
        2**63,
        -(2**63),
        2**64,
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        -0.0,
    ]
    others = [
        None,
        True,
        [],
        {},
        [[]],
        {"": 0},
        [0] * 2000,
        deep,
        {"rows": -1},
        {"rows": 2**62},
        {"class_name": "exec"},
    ]
    return [*code(arena), *places, *texts, *numbers, *others]


# Bytes


def garbled(arena: Arena, path: Path, rng: random.Random) -> None:
    """Some bytes are changed, left out, doubled or put in; numbers among them become huge."""
    path.write_bytes(damaged(path.read_bytes(), rng))


def flipped(arena: Arena, path: Path, rng: random.Random) -> None:
    """One bit is flipped."""
    content = bytearray(path.read_bytes())
    if not content:
        raise Unfit
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncated(arena: Arena, path: Path, rng: random.Random) -> None:
    """The file ends early."""
    os.truncate(path, rng.randrange(max(path.stat().st_size, 1)))


@functools.cache
def bomb() -> bytes:
    """Return what becomes a gigabyte when it is decompressed."""
    return gzip.compress(b"\0" * (1 << 28), 1) * 4


def replaced(arena: Arena, path: Path, rng: random.Random) -> None:
    """Something else has the file's name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x", "x")
    html = b"<!DOCTYPE html><html>no</html>"
    choices = [
        b"",
        b"\0" * 4096,
        html,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe" + b"\xd8\x00" * 99,
        out.getvalue(),
    ]
    choices += [bomb(), b"\x89HDF\r\n\x1a\n" + rng.randbytes(500), b"\n" * 1_000_000]
    path.write_bytes(rng.choice(choices))


def pickled(arena: Arena, path: Path, rng: random.Random) -> None:
    """A pickle that runs code has the file's name, or is an array in it."""
    content = pickle.dumps(Opened(arena.executed), rng.choice((0, 2, 4)))
    if rng.random() < 0.5:
        content = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", content)
    if path.suffix == ".npz" or rng.random() < 0.2:
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy", "data.pkl"):
                archive.writestr(name, content)
    else:
        path.write_bytes(content)


# What lies in the file's place


def linked(arena: Arena, path: Path, rng: random.Random) -> None:
    """A link out of the folder."""
    path.unlink()
    targets = [
        "../outside/canary.txt",
        arena.outside / "canary.txt",
        arena.outside / "none",
        arena.outside,
        "/dev/zero",
    ]
    path.symlink_to(rng.choice([*targets, "/etc/hostname", "/proc/self/mem", path.name]))


def folder_linked(arena: Arena, path: Path, rng: random.Random) -> None:
    """The file's folder is a link out of the folder."""
    if arena.inside in (path.parent, path.parent.parent):  # where the user's own word leads is the user's to say
        raise Unfit
    shutil.rmtree(path.parent)
    path.parent.symlink_to(arena.outside if rng.random() < 0.5 else arena.outside / "checkpoints")


def piped(arena: Arena, path: Path, rng: random.Random) -> None:
    """A named pipe that nobody writes to, a socket, or a folder."""
    path.unlink()
    match rng.randrange(4):
        case 0 | 1:
            os.mkfifo(path)
        case 2:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:  # a name that is too long
                server.bind(os.path.relpath(path))
        case _:
            path.mkdir()


def sparse(arena: Arena, path: Path, rng: random.Random) -> None:
    """A file that is larger than memory, with its own beginning or without."""
    if rng.random() < 0.5:
        path.write_bytes(b"")
    os.truncate(path, 1 << rng.choice((34, 36, 40)))


def stray(arena: Arena, path: Path, rng: random.Random) -> None:
    """Beside the file lies what has another name of the program's, or one to be shown."""
    names = [f".{path.name}.{os.getpid()}.tmp", f"{path.name}.part", "lock", "holder", "summary.json", "metrics.jsonl"]
    names += ["\x1b]0;owned\x07.npz", "a\nb", "-rf", "evil.py", "config.yaml", "numpy.py", "usercustomize.py", "states"]
    place = path.with_name(rng.choice(names))
    if place == path or place.exists():
        raise Unfit
    match rng.randrange(5):
        case 0:
            place.symlink_to(rng.choice((arena.outside / "canary.txt", arena.outside / "none", arena.outside)))
        case 1:
            os.mkfifo(place)
        case 2:
            place.mkdir()
        case 3:
            place.write_text(f"open({str(arena.executed)!r}, 'w')\nbuild_model = None\n")
        case _:
            place.write_bytes(rng.randbytes(200))


# Values in text and JSON


def changed(arena: Arena, document: Any, rng: random.Random) -> Any:
    """Return a document of JSON in which something was replaced, left out, renamed or put in."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(value, dict | list):
                visit(value)

    if isinstance(document, dict | list):
        visit(document)
    if not places:
        return rng.choice(values(arena))
    for _ in range(rng.choice((1, 1, 1, 3))):
        holder, key = rng.choice(places)
        new = rng.choice(values(arena) if rng.random() < 0.7 else code(arena))
        try:
            match rng.randrange(8):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[str(rng.choice(values(arena)))[:5000]] = holder.pop(key)
                case 2 if isinstance(holder, dict):
                    holder[rng.choice(("__class__", "module", "class_name", "function", "lambda", "\x1b[2J"))] = new
                case 2:
                    holder.extend([holder[key]] * rng.choice((1, 1000)))
                case _:
                    holder[key] = new
        except (KeyError, IndexError):  # already gone
            pass
    return document


def values_in_json(arena: Arena, path: Path, rng: random.Random) -> None:
    """Values, or a line's, are others."""
    try:
        if path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(changed(arena, json.loads(lines[at]), rng))
            path.write_text("\n".join([*lines, *lines[:1] * rng.randrange(2)]) + "\n")
            return
        document = changed(arena, json.loads(path.read_text()), rng)
    except ValueError:
        raise Unfit from None
    if path.name == "manifest.json" and isinstance(document, dict):  # which holds its own digest
        text = {name: value for name, value in document.items() if name != "sha256"}
        document = text | {"sha256": hashlib.sha256(json.dumps(text).encode()).hexdigest()}
        path.write_text(json.dumps(document))
        return
    path.write_text(json.dumps(document, indent=rng.choice((None, 1, 2))))
    resealed(path)


def resealed(path: Path) -> None:
    """Let a checkpoint's manifest agree with its files."""
    manifest = path.with_name("manifest.json")
    if not manifest.is_file():
        return
    document = json.loads(manifest.read_text())
    content = path.read_bytes()
    checked = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)
    document["files"][path.name] = [len(content), checked, hashlib.sha256(content[:checked]).hexdigest()]
    text = {name: value for name, value in document.items() if name != "sha256"}
    text["sha256"] = hashlib.sha256(json.dumps(text).encode()).hexdigest()
    manifest.write_text(json.dumps(text))


def values_in_yaml(arena: Arena, path: Path, rng: random.Random) -> None:
    """Values are others, or YAML itself is turned against its reader."""
    import yaml

    text = path.read_text()
    match rng.randrange(6):
        case 0:
            bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
            path.write_text(bomb + text)
        case 1:
            path.write_text(text + "more: " + rng.choice(("[", "{a: ")) * 20_000)
        case 2:
            tag = rng.choice(("apply", "new", "name", "module"))
            line = f"seed: !!python/object/{tag}:os.system ['touch {arena.executed}']\n"
            path.write_text(text + line if rng.random() < 0.5 else line)
        case 3:
            path.write_text(text + "\n" + "".join(f"{key}\n" for key in ("seed: &s [*s]", "<<: {seed: 1}", "? [a]: b")))
        case _:
            document = changed(arena, yaml.safe_load(text), rng)
            path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=rng.random() < 0.5))


def text(arena: Arena, path: Path, rng: random.Random) -> None:
    """A table with cells, names and lines that nobody expects."""
    lines = path.read_text().splitlines()
    cells = [str(value)[:100_000] for value in values(arena)] + [
        '"',
        '"' * 9,
        "=cmd|'/c calc'!A1",
        "1e400",
        "0x1f",
        ",,,,",
    ]
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.choice((0, rng.randrange(len(lines))))
        row = lines[at].split(",")
        row[rng.randrange(len(row))] = rng.choice(cells)
        lines[at] = ",".join(row)
    if rng.random() < 0.1:
        lines[0] += ",c" * 200_000
    path.write_text("\n".join(lines), errors="surrogatepass")


# Containers


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    """Return an .npy file with a header of any text."""
    body = header.encode()
    size = len(body).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + body + content


def hostile_npy(arena: Arena, rng: random.Random) -> bytes:
    """Return an .npy file whose header lies, or is code."""
    shape = rng.choice(("(10000000000,)", "(-1,)", "(2**40,)", "(1,)*40", "(0,)", "(9999999,99999)", "()", "('a',)"))
    kind = rng.choice(("<f4", "|O", "|V9999999", "<U99999999", "nope", "<M8[ns]", f"' + {code(arena)[0]} + '"))
    headers = [
        f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}",
        code(arena)[0],
        "(" * 9000,
        "{" + "'a': 1," * 20_000 + "}",
        f"{{'descr': [('a', '{kind}')] * 9, 'fortran_order': {code(arena)[0]}, 'shape': (1,)}}",
    ]
    return npy(rng.choice(headers)[:65_000], b"\0" * rng.choice((0, 64)), rng.choice((1, 2, 9)))


def in_npy(arena: Arena, path: Path, rng: random.Random) -> None:
    """The header of an array."""
    path.write_bytes(hostile_npy(arena, rng))


def in_idx(arena: Arena, path: Path, rng: random.Random) -> None:
    """Sizes that no memory has, in .gz as well."""
    sizes = rng.choice(([2**32 - 1] * 4, [60_000, 2**31, 2**31], [0, 0, 0], [32, 4, 4] * 80, [2**32 - 1]))
    content = bytes([0, 0, rng.choice((8, 13, 14, 99)), len(sizes) % 256])
    content += b"".join(size.to_bytes(4, "big") for size in sizes) + b"\0" * 600
    if path.suffix == ".gz":
        content = gzip.compress(content, 1) + (bomb() if rng.random() < 0.5 else b"")
    path.write_bytes(content)


def in_zip(arena: Arena, path: Path, rng: random.Random) -> None:
    """An archive's members: their values, their names, their sizes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen = rng.choice(list(members))
    extra: list[tuple[zipfile.ZipInfo, bytes]] = []
    match rng.randrange(8):
        case 0:
            name = rng.choice(
                ("../outside/canary.txt", str(arena.outside / "new"), "../../x", "a/../../outside/y", "\x1b[2J")
            )
            extra.append((zipfile.ZipInfo(name), b"overwritten"))
        case 1:
            members[chosen] = bytes(1 << 27)
        case 2:
            link = zipfile.ZipInfo(chosen if rng.random() < 0.5 else "assets")
            link.external_attr = 0o120777 << 16
            extra.append((link, str(arena.outside).encode()))
        case 3:
            extra.append((zipfile.ZipInfo(chosen), members[chosen][::-1]))  # a second of that name
        case _:
            inner = arena.folder / "temporary" / Path(chosen).name
            inner.write_bytes(members[chosen])
            within(inner)(arena, inner, rng)
            members[chosen] = inner.read_bytes()
            inner.unlink()
    with contextlib.suppress(UserWarning), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for info, content in extra:
            archive.writestr(info, content)


def in_hdf5(arena: Arena, path: Path, rng: random.Random) -> None:
    """Links out of the file, sizes without content, attributes of any kind."""
    import h5py
    import numpy as np

    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
        name = rng.choice(names)
        match rng.randrange(6):
            case 0:
                del file[name]
                file[name] = h5py.ExternalLink(str(arena.outside / "canary.txt"), "/x")
            case 1:
                shape = file[name].shape
                del file[name]
                outside = [(str(arena.outside / "canary.txt"), 0, h5py.h5f.UNLIMITED)]
                file.create_dataset(name, (2,) if not shape else shape[:1], "u1", external=outside)
            case 2:
                del file[name]
                file.create_dataset(name, (1 << 40,), "f8", chunks=(1 << 20,), compression="gzip")
            case 3:
                del file[name]
                file[name] = h5py.SoftLink(f"/{name}")
            case 4:
                file[name].attrs[rng.choice(("name", "class_name", "pickle"))] = rng.choice(code(arena))
                file.attrs["keras_version"] = np.void(pickle.dumps(Opened(arena.executed)))
            case _:
                shape = file[name].shape
                del file[name]
                file[name] = np.full(shape, rng.choice((np.nan, np.inf, 1e38)), rng.choice(("f8", "i4", "S3", "c16")))


def in_safetensors(arena: Arena, path: Path, rng: random.Random) -> None:
    """The header: shapes, offsets, metadata; what dptrain seals itself is sealed again."""
    from dptrain.saving import program, state

    content = path.read_bytes()
    if path.name.startswith("program"):
        attributes, arrays = state.unpack(content, "program", program._KIND, "")
        path.write_bytes(state.pack(arrays, changed(arena, attributes, rng), program._KIND))
        return
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    if "about" in metadata and rng.random() < 0.7:
        attributes, arrays = state.unpack(content, "state", metadata["format"], "")
        path.write_bytes(state.pack(arrays, changed(arena, attributes, rng), metadata["format"]))
    else:
        text = json.dumps(changed(arena, header, rng)).encode()
        path.write_bytes(rng.choice((len(text), len(text), 1 << 62)).to_bytes(8, "little") + text + content[8 + size :])
    resealed(path)


# By the file's ending: damages that know the format.
FORMATS: dict[str, Callable[[Arena, Path, random.Random], None]] = {
    ".json": values_in_json,
    ".jsonl": values_in_json,
    ".yaml": values_in_yaml,
    ".csv": text,
    ".keras": in_zip,
    ".npz": in_zip,
    ".h5": in_hdf5,
    ".npy": in_npy,
    ".safetensors": in_safetensors,
    ".gz": in_idx,
    "": in_idx,
}


def within(path: Path) -> Callable[[Arena, Path, random.Random], None]:
    """Return the damage that knows a file's format."""
    return FORMATS.get(path.suffix, garbled)


def by_format(arena: Arena, path: Path, rng: random.Random) -> None:
    """What the format holds is hostile: values, names, sizes, code, links."""
    within(path)(arena, path, rng)


# By name, with weights.
DAMAGES: dict[str, tuple[int, Callable[[Arena, Path, random.Random], None]]] = {
    "format": (10, by_format),
    "bytes": (3, garbled),
    "bit": (1, flipped),
    "end": (1, truncated),
    "other content": (2, replaced),
    "pickle": (1, pickled),
    "link": (3, linked),
    "linked folder": (1, folder_linked),
    "pipe": (2, piped),
    "sparse": (1, sparse),
    "stray file": (2, stray),
}
