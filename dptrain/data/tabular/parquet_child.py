"""Reads one Parquet file in bounded memory and writes it as plain Arrow; run as a script by `parquet`.

Arguments: `sys.path` as JSON, file descriptors to read and to write, limits of bytes and of columns, and, for a shard
of a stream, the columns to read as JSON (null for all). Prints one line of JSON: an error, or nothing. With `sys.path`
and a list of paths alone, it prints a line of each file: its rows, bytes and columns, or an error.
"""

import json
import os
import sys

# Memory beyond what a file declares: for buffers and decoded pages, and for each column.
_SLACK, _OF_A_COLUMN = 1 << 28, 1 << 14
# Most bytes of pandas' description of a table.
_MOST_METADATA = 1 << 24


def main(path: str, source: str, target: str = "", max_bytes: str = "0", most: str = "0", columns: str = "") -> None:
    """Read, write, and print."""
    sys.path[:] = json.loads(path)
    # Arrow's own allocator reserves a gigabyte at a time: in bounded memory it ends the process.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    if not target:
        for name in json.loads(source):
            print(json.dumps(_described(name)), flush=True)
    elif columns:
        print(json.dumps(_rewritten(int(source), int(target), int(max_bytes), json.loads(columns))), flush=True)
    else:
        print(json.dumps(_copied(int(source), int(target), int(max_bytes), int(most))), flush=True)
    os._exit(0)  # threads of the library's own may abort at an ordinary end


def _copied(source: int, target: int, max_bytes: int, most_columns: int) -> dict[str, object]:
    import pyarrow
    from pyarrow import parquet

    try:
        with open(source, "rb", closefd=False) as file:
            opened = parquet.ParquetFile(file)
            metadata, schema = opened.metadata, opened.schema_arrow
            if len(schema) > most_columns:
                return {"columns": len(schema)}
            for field in schema:
                if not _is_cell(field.type):
                    return {"name": field.name, "type": str(field.type)}
            stored = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            # Repeated values are stored once: what they become is a number or a code a cell.
            declared = max(stored, metadata.num_rows * max(len(schema), 1) * 8)
            if declared > max_bytes:
                return {"declared": declared}
            _bound_memory(2 * declared + _SLACK + _OF_A_COLUMN * len(schema))
            texts = [field.name for field in schema if _is_text(field.type)]
            file.seek(0)
            table = parquet.ParquetFile(file, read_dictionary=texts).read(use_threads=False)
        names = _index_columns(schema.metadata or {})
        table = table.select([*names, *(name for name in table.column_names if name not in names)])
        table = table.replace_schema_metadata(None)
        with open(target, "wb", closefd=False) as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    except MemoryError:
        return {"damaged": "it takes more memory than it declares"}
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        return {"damaged": " ".join(str(error).split())[:200]}
    return {}


def _described(path: str) -> dict[str, object]:
    """Return what the end of a file declares."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:
            opened = parquet.ParquetFile(file)
            metadata, schema = opened.metadata, opened.schema_arrow
            stored = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            columns = [[field.name, str(field.type)] for field in schema]
            return {"rows": metadata.num_rows, "bytes": stored, "columns": columns}
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        return {"damaged": " ".join(str(error).split())[:200]}


def _rewritten(source: int, target: int, max_bytes: int, columns: list[str] | None) -> dict[str, object]:
    """Write a shard's columns as a file of one Arrow table."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open(source, "rb", closefd=False) as file:
            opened = parquet.ParquetFile(file)
            metadata, names = opened.metadata, opened.schema_arrow.names
            if missing := [name for name in columns or () if name not in names]:
                return {"missing": missing[0]}
            stored = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            if stored > max_bytes:
                return {"declared": stored}
            # Decoded numbers and texts may take more than what is stored of repeated ones: the limit is the user's.
            _bound_memory(2 * max(max_bytes, stored) + _SLACK)
            table = opened.read(columns=columns, use_threads=False).combine_chunks().replace_schema_metadata(None)
        if table.nbytes > max_bytes:
            return {"declared": table.nbytes}
        with open(target, "wb", closefd=False) as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    except MemoryError:
        return {"declared": max_bytes + 1}
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        return {"damaged": " ".join(str(error).split())[:200]}
    return {}


def _is_text(kind: object) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_cell(kind: object) -> bool:
    """Whether a type holds numbers, texts, booleans or dates."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_cell(kind.value_type)  # type: ignore[attr-defined]
    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_null, types.is_date, types.is_timestamp)
    return _is_text(kind) or any(check(kind) for check in checks)


def _index_columns(metadata: dict[bytes, bytes]) -> list[str]:
    text = metadata.get(b"pandas", b"")
    if not text or len(text) > _MOST_METADATA:
        return []
    try:
        tree = json.loads(text)
        indices = tree["index_columns"]
        names = [index for index in indices if isinstance(index, str)]
        columns = [column["field_name"] for column in tree["columns"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return names if len(set(names)) == len(names) and set(names) <= set(columns) else []


def _bound_memory(more: int) -> None:
    import resource

    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            used = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, StopIteration, ValueError):  # no /proc, or a lower limit that stands already
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
