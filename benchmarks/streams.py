"""Samples a second out of shards on a disk, beside MosaicML Streaming, WebDataset and PyTorch's DataLoader.

    python benchmarks/streams.py [--peers PYTHON] [--rounds 7] [--output FILE]

Two works, shuffled, in batches of 64: windows of 256 token ids, and pictures of 64x64 in JPEG with a class. Each
library reads the format that it is for. Workers are started once, and then take turns, a pass each; --peers is the
Python that has the peers, if this one has not. Ranges of ratios are those of the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHARDS, WINDOW, WINDOWS, PICTURES, SIDE, BATCH = 16, 256, 2000, 300, 64, 64
WORKS = ("tokens", "pictures")


def write_all(folder: Path) -> None:
    """Write the same samples in every format that this Python can write."""
    rng = np.random.default_rng(0)
    if not (folder / "tokens").exists():
        (folder / "tokens").mkdir()
        for shard in range(SHARDS):
            ids = rng.integers(0, 50257, WINDOWS * WINDOW + 1).astype(np.uint16)
            ids.tofile(folder / f"tokens/{shard:02}.bin")
    if not (folder / "pictures").exists():
        import io
        import tarfile

        from PIL import Image

        (folder / "pictures").mkdir()
        (folder / "files").mkdir()
        for shard in range(SHARDS):
            with tarfile.open(folder / f"pictures/{shard:02}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
                for index in range(PICTURES):
                    pixels = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3)).astype(np.uint8).repeat(8, 0).repeat(8, 1)
                    content = io.BytesIO()
                    Image.fromarray(pixels).save(content, "JPEG")
                    name = f"{shard:02}{index:05}"
                    (folder / f"files/{name}.jpg").write_bytes(content.getvalue())
                    for ending, body in (("jpg", content.getvalue()), ("cls", str(index % 10).encode())):
                        member = tarfile.TarInfo(f"{name}.{ending}")
                        member.size = len(body)
                        archive.addfile(member, io.BytesIO(body))


def write_for_streaming(folder: Path) -> None:
    """Write MosaicML's shards of the samples."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds-tokens"), columns={"ids": f"ndarray:uint16:{WINDOW + 1}"}) as out:
        for path in sorted((folder / "tokens").glob("*.bin")):
            ids = np.fromfile(path, np.uint16)
            for start in range(0, WINDOWS * WINDOW, WINDOW):
                out.write({"ids": ids[start : start + WINDOW + 1]})
    with MDSWriter(out=str(folder / "mds-pictures"), columns={"x": "jpeg", "y": "int"}) as out:
        from PIL import Image

        for index, path in enumerate(sorted((folder / "files").glob("*.jpg"))):
            out.write({"x": Image.open(path), "y": index % PICTURES % 10})


# Libraries: each returns a function that yields the batches of a pass.


def dptrain_batches(folder: Path, work: str, threads: int) -> Callable[[], Iterator[Any]]:
    sys.path.insert(0, str(ROOT))
    from concurrent.futures import ThreadPoolExecutor

    import dptrain as dp

    options = {"sequence_length": WINDOW} if work == "tokens" else {}
    data = dp.utils.ShardedDataset(str(folder / work), BATCH, seed=1, **options)
    if threads == 0:
        return lambda: iter(data)
    passes = iter(range(10**6))

    def ahead() -> Iterator[Any]:
        data.on_pass_begin(next(passes))
        with ThreadPoolExecutor(threads) as pool:  # as `fit` draws them
            pending = [pool.submit(data.__getitem__, index) for index in range(2 * threads)]
            for index in range(len(data)):
                batch = pending[index % len(pending)].result()
                if index + len(pending) < len(data):
                    pending[index % len(pending)] = pool.submit(data.__getitem__, index + len(pending))
                yield batch

    return ahead


def torch_batches(folder: Path, work: str, workers: int) -> Callable[[], Iterator[Any]]:
    import torch

    class Tokens(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.shards = [np.memmap(path, np.uint16, "r") for path in sorted((folder / "tokens").glob("*.bin"))]

        def __len__(self) -> int:
            return SHARDS * WINDOWS

        def __getitem__(self, index: int) -> Any:
            shard, window = divmod(index, WINDOWS)
            ids = self.shards[shard][window * WINDOW : window * WINDOW + WINDOW + 1].astype(np.int32)
            return ids[:-1], ids[1:]

    class Pictures(torch.utils.data.Dataset):
        paths = sorted((folder / "files").glob("*.jpg"))

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> Any:
            from PIL import Image

            return np.asarray(Image.open(self.paths[index])), index % PICTURES % 10

    loader = torch.utils.data.DataLoader(
        Tokens() if work == "tokens" else Pictures(), BATCH, shuffle=True, num_workers=workers
    )
    return lambda: iter(loader)


def streaming_batches(folder: Path, work: str, workers: int) -> Callable[[], Iterator[Any]]:
    import streaming
    import torch

    class Samples(streaming.StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            if work == "tokens":
                ids = sample["ids"].astype(np.int32)
                return ids[:-1], ids[1:]
            return np.asarray(sample["x"]), sample["y"]

    streaming.base.util.clean_stale_shared_memory()
    data = Samples(local=str(folder / f"mds-{work}"), shuffle=True, batch_size=BATCH)
    loader = torch.utils.data.DataLoader(data, BATCH, num_workers=workers)
    return lambda: iter(loader)


def webdataset_batches(folder: Path, work: str, workers: int) -> Callable[[], Iterator[Any]]:
    import webdataset

    if work == "tokens":
        raise SystemExit("no format for token ids")
    urls = [str(path) for path in sorted((folder / "pictures").glob("*.tar"))]
    data = webdataset.WebDataset(urls, shardshuffle=SHARDS, empty_check=False).shuffle(1000).decode("rgb8")
    data = data.to_tuple("jpg", "cls").batched(BATCH)
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=workers)
    return lambda: iter(loader)


LIBRARIES = {
    "dptrain": (dptrain_batches, (0, 2)),
    "PyTorch": (torch_batches, (0, 2)),
    "MosaicML Streaming": (streaming_batches, (0, 2)),
    "WebDataset": (webdataset_batches, (0, 2)),
}


def worker(folder: Path, work: str, library: str, workers: int) -> None:
    """Print how many samples a second a pass gives, at each line of standard input."""
    begin = LIBRARIES[library][0](folder, work, workers)
    for _ in sys.stdin:
        started, samples, total = time.perf_counter(), 0, 0
        for x, _ in begin():
            samples += len(x)
            total += int(np.asarray(x).reshape(-1)[0])
        print(json.dumps([samples, time.perf_counter() - started]), flush=True)


class Workers:
    """Processes that measure a work in each library, with and without workers of their own."""

    def __init__(self, folder: Path, work: str, peers: str) -> None:
        self.processes: dict[tuple[str, int], subprocess.Popen[str]] = {}
        for library, (_, counts) in LIBRARIES.items():
            for count in counts:
                python = sys.executable if library == "dptrain" else peers
                command = [python, __file__, "--worker", str(folder), work, library, str(count)]
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                self.processes[library, count] = process
                if self.measure(library, count) is None:  # the first pass warms it
                    self.processes.pop((library, count))

    def measure(self, library: str, count: int) -> float | None:
        process = self.processes[library, count]
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            samples, seconds = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            return None
        return samples / seconds

    def close(self) -> None:
        for process in self.processes.values():
            process.stdin.close()
            process.wait()


def report(rates: dict[str, dict[tuple[str, int], list[float]]]) -> str:
    """Return tables of samples a second, and ratios of the same rounds to the best peer."""
    from benchmarks.common import command_line, machine_line, spread, versions

    lines = ["# Streams of shards", "", command_line(), machine_line(), ""]
    lines += [versions(["dptrain", "numpy", "pillow"]), ""]
    for work, by_library in rates.items():
        lines += [
            f"## {work}",
            "",
            "| library | workers | samples/s | dptrain's best is times as fast |",
            "|---|---|---|---|",
        ]
        ours = max(
            (key for key in by_library if key[0] == "dptrain"), key=lambda key: statistics.median(by_library[key])
        )
        for (library, count), values in by_library.items():
            ratios = [a / b for a, b in zip(by_library[ours], values, strict=True)]
            lines.append(f"| {library} | {count} | {spread(values, ',.0f')} | {spread(ratios, '.2f')} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, work, library, count = options.worker
        worker(Path(folder), work, library, int(count))
        return
    if options.write:
        write_for_streaming(options.write)
        return
    sys.path.insert(0, str(ROOT))
    rates: dict[str, dict[tuple[str, int], list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder))
        subprocess.run([options.peers, __file__, "--write", folder], check=False)
        for work in WORKS:
            workers = Workers(Path(folder), work, options.peers)
            rates[work] = {key: [] for key in workers.processes}
            for _ in range(options.rounds):
                for library, count in workers.processes:
                    rate = workers.measure(library, count)
                    assert rate is not None, f"{library} has stopped"
                    rates[work][library, count].append(rate)
            workers.close()
    text = report(rates)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
