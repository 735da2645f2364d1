"""Reads one Parquet file in bounded memory and writes it as plain Arrow; run as a script by `parquet`.

Arguments: `sys.path` as JSON, file descriptors to read and to write, limits of bytes and of columns. Prints one line of
JSON: an error, or nothing.
"""

import json
import os
import sys

# Memory beyond what a file declares: for buffers and decoded pages, and for each column.
_SLACK, _OF_A_COLUMN = 1 << 28, 1 << 14
# Most bytes of pandas' description of a table.
_MOST_METADATA = 1 << 24


def main(path: str, source: str, target: str, max_bytes: str, most_columns: str) -> None:
    """Read, write, and print."""
    sys.path[:] = json.loads(path)
    # Arrow's own allocator reserves a gigabyte at a time: in bounded memory it ends the process.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    print(json.dumps(_copied(int(source), int(target), int(max_bytes), int(most_columns))), flush=True)
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
