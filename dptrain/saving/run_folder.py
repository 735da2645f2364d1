"""The models in the folders that trainings and sweeps leave.

model.keras        a run's model at its end; best.keras where a monitored metric said which epoch was best
models/*.keras     those that a sweep has kept
"""

from pathlib import Path

from dptrain.errors import ConfigError, DataError
from dptrain.runtime.files import FILE, Directory, open_directory
from dptrain.saving.checkpoints import newest_name

MODEL, BEST = "model.keras", "best.keras"
CONFIG, SUMMARY, CHECKPOINTS = "config.yaml", "summary.json", "checkpoints"
TENSORBOARD, WANDB = "tensorboard", "wandb"
METRICS, WEIGHTS, CURVES = "metrics.jsonl", "model.safetensors", "curves.png"
PLAN, MODELS = "sweep.yaml", "models"


def model_file(path: Path, *, best: bool = False) -> Path:
    """Return the model's file: the path itself, or what a folder of a run or a sweep holds. On rank 0.

    Args:
        path: a `.keras` file, or the folder of a run or of a sweep that has kept one model.
        best: the run's best model instead of its last.

    Raises:
        ConfigError: neither a folder nor a `.keras` file; or `best` of a file.
        DataError: the folder has no model, or more than one, or a link or the like in its place; says what to do.
    """
    try:
        is_folder = path.is_dir()
        if not is_folder:
            if path.suffix != ".keras":
                raise _no_model(path)
            if best:
                raise ConfigError(f"{path}: best = True needs the folder of a run, not one file")
            return path
        name = BEST if best else MODEL
        with open_directory(path) as folder:
            if folder.expect(name, FILE) is not None:
                return path / name
            if folder.kind(PLAN) is not None:
                return _kept(folder)
        raise DataError(f"{path}: {_missing(path, name)}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _no_model(path: Path) -> Exception:
    if path.suffix or path.exists():
        return ConfigError(
            f"Invalid filename: expected a `.keras` extension, or the folder of a run. Received: filepath={path}"
        )
    return DataError(f"{path}: not found; expected the folder of a run, or a .keras file")


def _missing(path: Path, name: str) -> str:
    """Say why a folder has no such model, and what to do."""
    if not (path / CONFIG).exists():
        inside = sorted(one.parent.name for one in path.glob(f"*/{MODEL}"))
        hint = f"; did you mean {path / inside[-1]}?" if inside else ""
        return f"no folder of a run: it has neither {name} nor {CONFIG}{hint}"
    if (path / SUMMARY).exists():
        if name == BEST:
            return f"no {BEST}: the run monitored no metric; its last model is {MODEL}"
        return f"no {MODEL}: the run is of an earlier version; `python -m dptrain --config {path / CONFIG}` repeats it"
    newest = newest_name(path / CHECKPOINTS)
    found = "it has no checkpoint" if newest is None else f"its newest checkpoint is {CHECKPOINTS}/{newest}"
    resume = f"python -m dptrain --config {path / CONFIG} --out {path}"
    return f"no {name}: the run has not finished; {found}; `{resume}` finishes it"


def _kept(folder: Directory) -> Path:
    found = []
    if folder.kind(MODELS) is not None:
        with folder.folder(MODELS) as models:
            found = [name for name in models.names() if name.endswith(".keras") and not name.startswith(".")]
            if len(found) == 1 and models.expect(found[0], FILE):
                return models.path / found[0]
    if not found:
        raise DataError(f"{folder.path}: the sweep has kept no model; --keep best keeps those of its best trial")
    names = ", ".join(f"{MODELS}/{name}" for name in found[:3]) + (", ..." if len(found) > 3 else "")
    raise DataError(f"{folder.path}: the sweep has kept {len(found)} models: name one of {names}")
