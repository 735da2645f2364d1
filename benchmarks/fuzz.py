"""Damaged and senseless inputs: is each refused in one clear line, or taken for what it says?

    python benchmarks/fuzz.py --count 10000 --flips 1000 --output benchmarks/results/fuzz_HARDWARE_DATE.md
    python benchmarks/fuzz.py --only options:17    # one input of this seed alone, with all that is printed

Inputs are drawn from `--seed` and a number: options of the command line, and config.yaml, IDX, .gz, .npz and model
files and checkpoints of a small training, of which bytes or lines were changed, left out, doubled or put in. `python
-m dptrain` (a function here, for speed) or `load_model` gets them. Whatever is no success must be one line with an exit
code of the table in README.md: no traceback, no internal error, no input that takes longer than the time limit.

Of files that carry a checksum, `--flips` bits of each kind are flipped, one at a time: none may be loaded with other
values than were saved. Model files in Keras' formats need the extra keras-files.
"""

import argparse
import gzip
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Report, WorkerError, WorkerProcess, answer, answering, command_line, machine_line, versions

# Seconds that an input may take, and exit codes that it may have.
LIMIT = 60
CODES = {0, 2, 65, 69, 74, 76}
PIXELS, SAMPLES = 4, 32

# Things that people type, and things that nobody does.
VALUES = [
    *("", " ", "0", "1", "-1", "2", "1e-3", "0.5", "1e999", "-0.0", "nan", "inf", "1_000", "\u0661", "0x10", "1e-320"),
    *("99999999999999999999", "none", "None", "true", "off", "auto", "adam", "relu,tanh", "8,8", ",", "8,,8", "[1, 2]"),
    *("{a: 1}", "../..", "/dev/null", "/proc/self/mem", "/nonexistent/x", ".", "*", "é" * 300, "a\nb", "a\tb", "\x7f"),
    *("${HOME}", "--", "-h", "=", "epoch", "600s", "1h", "-5s", "0s", "epoch,none", "!!python/object:os.system"),
]


# In a worker: one place with a small data set, a configuration, models and a checkpoint


class Place:
    """An initially empty folder that inputs are made from."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        import dptrain as dp
        from dptrain.cli.options.config import leaves

        self.folder = folder
        self.options = [f"--{leaf.path}" for leaf in leaves() if leaf.path != "debug"]  # shows tracebacks
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (2 * SAMPLES, PIXELS, PIXELS), np.uint8)
        y = rng.integers(0, 10, 2 * SAMPLES, np.uint8)
        y[:10] = range(10)
        idx, zipped = folder / "idx", folder / "zipped"
        idx.mkdir()
        zipped.mkdir()
        for name, rows in (("train", slice(SAMPLES)), ("t10k", slice(SAMPLES, None))):
            for kind, array in (("images-idx3", x[rows]), ("labels-idx1", y[rows])):
                header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
                (idx / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())
                (zipped / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), mtime=0))
        np.savez(folder / "set.npz", x_train=x[:SAMPLES], y_train=y[:SAMPLES], x_test=x[SAMPLES:], y_test=y[SAMPLES:])
        self.train = ["--device", "cpu", "--hidden", "3", "--batch-size", "8", "--jit-compile", "off", "--epochs", "1"]
        code, text = self.command(["--print-config", *self.train, "--data", str(idx)])
        assert code == 0, text
        self.configuration = text.encode()
        self.run = folder / "run"
        code, text = self.command([*self.train, "--data", str(idx), "--out", str(self.run), "--steps-per-epoch", "2"])
        assert code == 0, text
        (self.run / "summary.json").unlink()  # as if it had not come to its end
        dp.utils.set_random_seed(0)
        self.model = dp.Sequential([dp.layers.Input((5,)), dp.layers.Dense(4, "relu"), dp.layers.Dense(3)])
        self.model.compile("adam", "mse", jit_compile=False)
        self.model.fit(np.zeros((8, 5), np.float32), np.zeros((8, 3), np.float32), verbose=0)
        self.files = {}
        for name in ("model.keras", "model.safetensors", "model.weights.h5"):
            save = self.model.save if name == "model.keras" else self.model.save_weights
            save(folder / name)
            self.files[name] = (folder / name).read_bytes()
        self.saved = [value.copy() for value in self.model.get_weights()]

    def command(self, arguments: list[str]) -> tuple[int, str]:
        """Return the exit code of a command line, and what it prints."""
        from dptrain.cli.main import main

        return self._captured(lambda: main([*arguments]))

    def load(self, name: str, content: bytes) -> tuple[int, str]:
        """Return what loading a file with that content would end with; other weights than were saved are code -1."""
        import dptrain as dp

        path = self.folder / f"damaged-{name}"
        path.write_bytes(content)
        sidecar = self.folder / f"{name}.sha256"
        if sidecar.exists():
            shutil.copy(sidecar, self.folder / f"damaged-{name}.sha256")

        def load() -> int:
            if name == "model.keras":
                weights = dp.models.load_model(path).get_weights()
            else:
                self.model.set_weights([0 * value for value in self.saved])
                self.model.load_weights(path)
                weights = self.model.get_weights()
            same = [
                saved.shape == two.shape and (saved == two).all()
                for saved, two in zip(weights, self.saved, strict=False)
            ]
            return 0 if all(same) and len(weights) == len(self.saved) else -1

        return self._captured(load)

    def _captured(self, action: Callable[[], int]) -> tuple[int, str]:
        from dptrain.runtime import failure

        with tempfile.TemporaryFile("w+", errors="replace") as file:
            sys.stdout.flush()
            sys.stderr.flush()
            before = os.dup(1), os.dup(2)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                code = action()
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0
            except BaseException as error:
                code = failure.end_job(error)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for number, old in enumerate(before, 1):
                    os.dup2(old, number)
                    os.close(old)
            file.seek(0)
            return code, file.read()


def _equal(first: Any, two: Any) -> bool:
    return bool(first.shape == two.shape and (first == two).all())


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some were changed, left out, doubled or put in."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(result) + 1) if rng.random() < 0.6 else rng.randrange(min(len(result), 64) + 1)
        size = rng.choice((1, 1, 4, 8, rng.randrange(1, 64)))
        match rng.randrange(6):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                result[at : at + size] = rng.randbytes(len(result[at : at + size]))
            case 2:
                del result[at : at + size]
            case 3:
                result[at:at] = rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size, result[at : at + size]))
            case 4:
                del result[at:]
            case _:
                number = rng.choice((0, 1, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)) + rng.randrange(2)
                result[at : at + 8] = (number % (1 << 64)).to_bytes(8, rng.choice(("big", "little")))
    return bytes(result)


def damaged_text(text: str, rng: random.Random) -> str:
    """Return YAML of which lines were changed, left out, doubled or put in."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                lines.pop(at)
            case 1:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 2:
                lines[at] = " " * rng.randrange(4) + lines[at].strip()
            case 3 | 4:
                lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(VALUES)
            case _:
                lines.insert(at, f"{rng.choice(VALUES)}: {rng.choice(VALUES)}")
        if not lines:
            lines = [""]
    return "\n".join(lines)


def options(place: Place, rng: random.Random) -> tuple[int, str]:
    """Options that exist or nearly do, with values that fit or do not."""
    arguments = [rng.choice((*["train"] * 8, "sweep", "explain", "trian", ""))] if rng.random() < 0.3 else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(place.options)
        if rng.random() < 0.1:
            name = name[: rng.randrange(len(name))] + rng.choice(("", "x", "-", "=1"))
        arguments.append(name)
        if rng.random() < 0.9:
            arguments.append(rng.choice(VALUES))
    return place.command([*arguments, "--print-config"])


def configuration(place: Place, rng: random.Random) -> tuple[int, str]:
    """A configuration file."""
    path = place.folder / "config.yaml"
    text = place.configuration
    changed = damaged(text, rng) if rng.random() < 0.3 else damaged_text(text.decode(), rng).encode(errors="replace")
    path.write_bytes(changed)
    return place.command(["--config", str(path), "--print-config"])


def data(folder: str) -> Callable[[Place, random.Random], tuple[int, str]]:
    """A data set in a folder, of which one file is damaged, or a single file."""

    def train(place: Place, rng: random.Random) -> tuple[int, str]:
        source, target = place.folder / folder, place.folder / "damaged" / folder
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        if source.is_dir():
            shutil.copytree(source, target)
            chosen = rng.choice(sorted(target.iterdir()))
        else:
            shutil.copy(source, target)
            chosen = target
        content = chosen.read_bytes()
        if chosen.suffix == ".gz" and rng.random() < 0.5:  # a whole archive of damaged content
            chosen.write_bytes(gzip.compress(damaged(gzip.decompress(content), rng)))
        else:
            chosen.write_bytes(damaged(content, rng))
        out = place.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        shape = ["--data", str(target), "--fast-dev-run", "--data.max_bytes", "1000000", "--out", str(out)]
        return place.command([*place.train, *shape])

    return train


def model(name: str) -> Callable[[Place, random.Random], tuple[int, str]]:
    """A model or weights file."""
    return lambda place, rng: place.load(name, damaged(place.files[name], rng))


def flip(name: str) -> Callable[[Place, random.Random], tuple[int, str]]:
    """A model or weights file of which a bit is flipped."""

    def load(place: Place, rng: random.Random) -> tuple[int, str]:
        content = bytearray(place.files[name])
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return place.load(name, bytes(content))

    return load


def checkpoint(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Place, random.Random], tuple[int, str]]:
    """A checkpoint of which one file is damaged, and that a run is to go on from."""

    def resume(place: Place, rng: random.Random) -> tuple[int, str]:
        target = place.folder / "damaged-run"
        shutil.rmtree(target, ignore_errors=True)
        (saved,) = (place.run / "checkpoints").iterdir()
        shutil.copytree(saved, target / "checkpoints" / saved.name)
        chosen = rng.choice(sorted((target / "checkpoints" / saved.name).iterdir()))
        chosen.write_bytes(change(chosen.read_bytes(), rng))
        out = place.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        from_there = ["--out", str(out), "--resume", str(target / "checkpoints" / saved.name)]
        data = ["--data", str(place.folder / "idx"), "--steps-per-epoch", "2"]
        code, text = place.command([*place.train, *data, *from_there])
        return (-1, text) if code == 0 else (code, text)

    return resume


def flipped_bit(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which one bit is flipped."""
    result = bytearray(content)
    result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
    return bytes(result)


# What is drawn by weight, and what carries a checksum: no other values may be loaded.
INPUTS: dict[str, tuple[int, Callable[[Place, random.Random], tuple[int, str]]]] = {
    "options": (5, options),
    "config.yaml": (5, configuration),
    "IDX": (3, data("idx")),
    "gzipped IDX": (2, data("zipped")),
    "npz": (3, data("set.npz")),
    "damaged checkpoint": (1, checkpoint(damaged)),
    "damaged model.keras": (2, model("model.keras")),
    "damaged model.safetensors": (2, model("model.safetensors")),
    "damaged model.weights.h5": (2, model("model.weights.h5")),
}
FLIPS: dict[str, Callable[[Place, random.Random], tuple[int, str]]] = {
    "checkpoint": checkpoint(flipped_bit),
    "model.keras": flip("model.keras"),
    "model.safetensors": flip("model.safetensors"),
    "model.weights.h5": flip("model.weights.h5"),
}
EVERY_KIND = {name: kind for name, (_, kind) in INPUTS.items()} | {
    f"flip in {name}": flip for name, flip in FLIPS.items()
}


def wrong(kind: str, code: int, text: str) -> str:
    """Return what is not as it should be, or ""."""
    if code == -1:
        # Bytes may change where nothing is kept: then the same values come out, which is no -1.
        return "loaded other values" if kind in ("checkpoint", "damaged checkpoint") or "flip" in kind else ""
    if "Traceback" in text:
        return "a traceback"
    if code not in CODES:
        return f"exit code {code}"
    messages = [line for line in text.splitlines() if line.startswith("dptrain: ")]
    if code and not messages:
        return "no message"
    if len([line for line in messages if "warning" not in line]) > 1:
        return f"{len(messages)} messages"
    return ""


def serve() -> None:
    """Answer questions [seed, kind, number] with [exit code, what is wrong, what was printed]."""
    questions, answers = answering()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="dptrain-fuzz-") as folder:
        place = Place(Path(folder))
        os.chdir(folder)
        for seed, kind, number in questions:
            code, text = EVERY_KIND[kind](place, random.Random(f"{seed} {kind} {number}"))
            answer(answers, [code, wrong(kind, code, text), text[-2000:]])


# The survey


def main() -> int:
    """Run what the options say; return 1 where anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="inputs, over all kinds (default: 1000)")
    parser.add_argument("--flips", type=int, default=100, help="bits in each kind of file (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input alone")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        serve()
        return 0
    if chosen.only:
        kind, _, number = chosen.only.rpartition(":")
        worker = start()
        code, what, text = worker.ask([chosen.seed, kind, int(number)], LIMIT)
        worker.close()
        print(f"{text}\nexit code {code}; {what or 'as it should be'}")
        return bool(what)
    return survey(chosen)


def start() -> WorkerProcess:
    """Return a worker, with compiled steps off and its own cache left alone."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    environment = {"DPTRAIN_JIT_COMPILE": "0", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    return WorkerProcess("fuzz", command, environment, quiet=True)


def survey(chosen: argparse.Namespace) -> int:
    """Try all inputs and report."""
    total = sum(weight for weight, _ in INPUTS.values())
    work = [(kind, number) for kind, (weight, _) in INPUTS.items() for number in range(chosen.count * weight // total)]
    work += [(f"flip in {name}", number) for name in FLIPS for number in range(chosen.flips)]
    begun = time.perf_counter()

    def some(first: int) -> list[tuple[str, int, int | str, str, str]]:
        """Try every `jobs`th input, in a worker that is started anew where it ends or is too slow."""
        worker, results = start(), []
        for kind, number in work[first :: chosen.jobs]:
            try:
                code, what, text = worker.ask([chosen.seed, kind, number], LIMIT)
            except WorkerError as error:
                code, what, text = "-", str(error), ""
                worker = start()
            results.append((kind, number, code, what, text))
        worker.close()
        return results

    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = [result for part in pool.map(some, range(chosen.jobs)) for result in part]
    report = Report()
    report.add("# Damaged and senseless inputs", "", command_line(), machine_line())
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'safetensors', 'h5py', 'PyYAML'))}")
    report.add(f"- Seed {chosen.seed}; {time.perf_counter() - begun:.0f} s; an input may take {LIMIT} s", "")
    report.add("| input | tried | taken | taken, other values | refused, by exit code | not as it should be |")
    report.add("|---|---|---|---|---|---|")
    for kind in dict.fromkeys(result[0] for result in results):
        alike = [result for result in results if result[0] == kind]
        codes = Counter(code for _, _, code, _, _ in alike)
        refused = ", ".join(f"{code} ({n})" for code, n in sorted(codes.items(), key=str) if code not in (0, -1))
        bad = sum(bool(what) for _, _, _, what, _ in alike)
        report.add(f"| {kind} | {len(alike)} | {codes[0]} | {codes[-1]} | {refused} | {bad} |")
    bad = [result for result in results if result[3]]
    report.add("", f"{len(results)} inputs: {len(bad)} not as they should be.")
    for kind, number, _, what, text in bad[:50]:
        last = text.strip().splitlines()[-1:] or [""]
        report.add(f"- {kind}:{number}: {what}; {last[0][:300]!r}")
    if chosen.output:
        report.save(chosen.output)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
