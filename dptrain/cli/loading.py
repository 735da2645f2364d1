"""Opens the data that `--data` names: named sets, arrays, tables, pictures."""

import dataclasses
from pathlib import Path

from dptrain.backend.cpu.mapped_files import guard_mapped_files
from dptrain.cli.options.config import DataConfig
from dptrain.comm import Communicator
from dptrain.data.catalog import CATALOG
from dptrain.data.loading import LoadedData, load_dataset
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.readers.npy_pair import load_pair
from dptrain.data.readers.pictures import PICTURES, PictureOptions, is_picture_folder, load_pictures
from dptrain.data.readers.text_folder import folder_options, is_text_folder
from dptrain.data.tabular.table_loading import load_table
from dptrain.data.tabular.table_options import TableOptions
from dptrain.data.tabular.tables import is_table
from dptrain.data.tasks import Task
from dptrain.errors import ConfigError, DataError

# Options of tables alone, by their fields.
_OF_TABLES = {
    "target": "--target",
    "columns": "--columns",
    "drop": "--drop",
    "categorical": "--categorical",
    "numbers": "--numbers",
    "text": "--text",
    "dates": "--dates",
    "unseen": "--unseen",
    "test_data": "--test-data",
    "rare": "--rare",
    "repair_header": "--repair-header",
    "auto": "--auto",
}


def load_configured(
    data: DataConfig, comm: Communicator, task: Task | None, preprocessing: Preprocessing | None = None
) -> LoadedData:
    """Return the configured data set; a trained model's `preprocessing` decides the columns' roles. Collective."""
    path = data.name.removeprefix(PICTURES)
    path = str(Path(path).expanduser()) if path.startswith("~/") else path
    are_texts = comm.broadcast_fact(comm.rank == 0 and is_text_folder(path))
    are_pictures = comm.broadcast_fact(comm.rank == 0 and not are_texts and is_picture_folder(path))
    comm.agree("configuration", lambda: _refuse_others(data, are_pictures, are_texts))
    if data.name.startswith(PICTURES):
        comm.agree("data", lambda: _require_pictures(path, are_pictures))
    if are_pictures:
        size = None if data.image_size is None else tuple(map(int, data.image_size.split("x")))
        pictures = PictureOptions(size, data.bad_pictures, data.test_split, data.follow_links)  # type: ignore[arg-type]
        return load_pictures(path, pictures, comm, preprocessing, max_bytes=data.max_bytes)
    if is_table(path) or are_texts:
        options = _table_options(data, task)
        where, options = folder_options(path, options) if are_texts else (path, options)
        loaded = load_table(where, options, comm, preprocessing, max_bytes=data.max_bytes)
        return dataclasses.replace(loaded, name=Path(path).name) if are_texts else loaded
    if path.endswith(".npy"):
        y = str(data.target)
        guard_mapped_files()
        return load_pair(path, y, comm, task=task, test_split=data.test_split, max_bytes=data.max_bytes)
    return load_dataset(
        data.name,
        comm,
        data_dir=None if data.dir is None else Path(data.dir),
        max_bytes=data.max_bytes,
        sharding=data.sharding,
        task=task,
    )


def _table_options(data: DataConfig, task: Task | None) -> TableOptions:
    return TableOptions(
        target=data.target,
        columns=data.columns,
        drop=data.drop,
        categorical=data.categorical,
        number_columns=data.numbers,
        texts=data.text,
        words=data.text_words,
        text_length=data.text_length,
        unseen=data.unseen,
        missing=data.missing,
        test=data.test_data,
        test_split=data.test_split,
        task=task,
        dates=data.dates,
        na=data.na,
        decimal=data.decimal,
        rare=data.rare,
        repair_header=data.repair_header,
        auto=data.auto,
    )


def _refuse_others(data: DataConfig, are_pictures: bool, are_texts: bool) -> None:
    if data.sharding == "static" and (is_table(data.name) or are_pictures or are_texts):
        raise ConfigError(
            "--sharding static: not supported for tables and pictures, which are kept once per node; leave it out"
        )
    is_npy = data.name.endswith(".npy")
    if is_npy and (data.target is None or not data.target.endswith(".npy")):
        raise ConfigError(f"--data {data.name}: --target FILE.npy names the file of the targets")
    if is_npy and data.sharding == "static":
        raise ConfigError(
            "--sharding static: not supported for .npy files, which are mapped and take no memory; leave it out"
        )
    for field, flag in _OF_TABLES.items():
        if getattr(data, field) and not is_table(data.name) and not (is_npy and field == "target"):
            raise ConfigError(f"{flag}: {data.name} is not a table (.csv, .tsv, .parquet)")
    for flag, is_set in (("--image-size", data.image_size is not None), ("--follow-links", data.follow_links)):
        if is_set and not are_pictures:
            if data.name not in CATALOG:
                _require_folder(data.name.removeprefix(PICTURES))
            raise ConfigError(f"{flag}: {data.name} is not a folder with one folder of pictures per class")


def _require_folder(path: str) -> None:
    if not Path(path).expanduser().exists():
        raise DataError(f"data: {path} not found; expected a folder with one folder of pictures per class")


def _require_pictures(path: str, are_pictures: bool) -> None:
    if not are_pictures:
        _require_folder(path)
        raise DataError(f"{path}: not a folder with one folder of pictures per class")
