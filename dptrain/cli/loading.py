"""What `--data` names, brought into memory: named sets, arrays, tables."""

from pathlib import Path

from dptrain.cli.config import DataConfig
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData, load_dataset
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.table_columns import TableOptions
from dptrain.data.table_loading import load_table
from dptrain.data.tables import is_table
from dptrain.data.tasks import Task
from dptrain.errors import ConfigError

# Options of tables alone, by their fields.
_OF_TABLES = {
    "target": "--target",
    "columns": "--columns",
    "drop": "--drop",
    "categorical": "--categorical",
    "test": "--test-data",
}


def load_configured(
    data: DataConfig, comm: Communicator, task: Task | None, known: Preprocessing | None = None
) -> LoadedData:
    """Return the configured data set, one copy a node. Collective.

    Args:
        data: names it.
        comm: the ranks.
        task: what is learned; None for what the targets look like.
        known: of a model that was trained on this data, which says what its columns are for.

    Raises:
        AgreedError: as `load_dataset` and `load_table`; or options of another kind of data.
    """
    path = str(Path(data.name).expanduser()) if data.name.startswith("~/") else data.name
    comm.agree("configuration", lambda: _refuse_others(data))
    if is_table(path):
        asked = TableOptions(
            data.target, data.columns, data.drop, data.categorical, data.missing, data.test, data.test_split, task
        )
        return load_table(path, comm, asked, max_bytes=data.max_bytes, known=known)
    return load_dataset(
        data.name,
        comm,
        data_dir=None if data.dir is None else Path(data.dir),
        max_bytes=data.max_bytes,
        sharding=data.sharding,
        task=task,
    )


def _refuse_others(data: DataConfig) -> None:
    """Refuse options that the kind of data has no use for.

    Raises:
        ConfigError: one is set.
    """
    if is_table(data.name):
        if data.sharding == "static":
            raise ConfigError("--sharding static: a table is kept once a node; leave it out")
        return
    for field, flag in _OF_TABLES.items():
        if getattr(data, field):
            raise ConfigError(f"{flag}: {data.name} is no table (.csv, .tsv, .parquet)")
