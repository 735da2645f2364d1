"""`python -m dptrain index`: writes lengths, sizes and checksums of shards beside them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.cli.options.config import Config
from dptrain.cli.options.parser import Options
from dptrain.errors import printable
from dptrain.runtime.failure import phase
from dptrain.runtime.output import terminal

if TYPE_CHECKING:
    from dptrain.comm import Communicator

OPTIONS = Options(
    "Write an index of shards, so that a run need not measure them: lengths, sizes and checksums. Under mpirun the "
    "ranks divide the shards.",
    lambda parser: _add_options(parser),
    ("data.token_dtype", "debug"),
    "SHARDS [SHARDS ...] [options]",
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = "paths, addresses, globs or folders of shards: .parquet, .tar, .npy, .bin"
    parser.add_argument("shards", metavar="SHARDS", nargs="+", help=text)


def index(config: Config, comm: "Communicator", parsed: argparse.Namespace) -> int:
    """Measure the shards on all ranks, and write an index into each folder on rank 0. Collective."""
    from dptrain.data.shards.formats import ReadOptions
    from dptrain.data.shards.index import INDEX, Indexed, checksum, encoded, folder_of, name_of
    from dptrain.data.shards.shard_set import ShardOptions, list_shards, measure_shards
    from dptrain.data.shards.stores import Store, is_local
    from dptrain.runtime.defaults import DEFAULT_CACHE_BYTES
    from dptrain.runtime.storage.files import write_atomically

    phase.enter("index")
    store = Store()
    options = ShardOptions(ReadOptions(token_dtype=config.data.token_dtype), "stop", DEFAULT_CACHE_BYTES, None)
    files = list_shards(parsed.shards, store, comm)
    extents = measure_shards(files, store, options, comm)
    mine = files[comm.rank :: comm.size]
    digests = comm.agree("data", lambda: [checksum(file, store) for file in mine])
    sha256 = {
        file.url: digest
        for rank, theirs in enumerate(comm.allgather(digests))
        for file, digest in zip(files[rank :: comm.size], theirs, strict=True)
    }

    def write() -> None:
        if comm.rank != 0:
            return
        for folder in dict.fromkeys(folder_of(file.url) for file in files):
            inside = [file for file in files if folder_of(file.url) == folder]
            entries = {name_of(f.url): Indexed(f.nbytes, extents[f.url], sha256[f.url]) for f in inside}
            content = encoded(entries)
            if is_local(folder):
                write_atomically(Path(folder) / INDEX, content)
            else:
                store.write(folder + INDEX, content)
            length = sum(entry.extent.length for entry in entries.values())
            nbytes = sum(entry.nbytes for entry in entries.values())
            unit = "tokens" if next(iter(entries.values())).extent.layout == "ids" else "samples"
            terminal.say(printable(f"{folder + INDEX}: {len(inside):,} shards, {length:,} {unit}, {nbytes:,} bytes"))

    comm.agree("output", write)
    return 0
