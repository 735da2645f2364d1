"""Models in folders of runs (model.keras; best.keras by a monitored metric) and sweeps (models/*.keras)."""

from pathlib import Path

from dptrain.errors import ConfigError, DataError
from dptrain.runtime.storage.files import FILE, Directory, open_directory
from dptrain.saving.checkpoints import newest_name

MODEL, BEST = "model.keras", "best.keras"
CONFIG, SUMMARY, CHECKPOINTS = "config.yaml", "summary.json", "checkpoints"
TENSORBOARD, WANDB = "tensorboard", "wandb"
METRICS, WEIGHTS, CURVES, TRACE = "metrics.jsonl", "model.safetensors", "curves.png", "trace.json"
STATE = "training.prom"
REPORT = "report.html"
PLAN, MODELS = "sweep.yaml", "models"


def model_file(path: Path, *, best: bool = False) -> Path:
    """Return the model's file: the path itself, or the one in a folder of a run or a sweep. On rank 0."""
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
                return _only_model(folder)
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
    if not (path / CONFIG).exists():
        inside = sorted(model.parent.name for model in path.glob(f"*/{MODEL}"))
        hint = f"; did you mean {path / inside[-1]}?" if inside else ""
        return f"no folder of a run: it has neither {name} nor {CONFIG}{hint}"
    if (path / SUMMARY).exists():
        if name == BEST:
            return f"no {BEST}: the run monitored no metric; its last model is {MODEL}"
        return f"no {MODEL}: the run is of an earlier version; `python -m dptrain --config {path / CONFIG}` repeats it"
    newest = newest_name(path / CHECKPOINTS)
    progress = "it has no checkpoint" if newest is None else f"its newest checkpoint is {CHECKPOINTS}/{newest}"
    resume = f"python -m dptrain --config {path / CONFIG} --out {path}"
    return f"no {name}: the run has not finished; {progress}; `{resume}` finishes it"


def _only_model(folder: Directory) -> Path:
    files = []
    if folder.kind(MODELS) is not None:
        with folder.folder(MODELS) as models:
            files = [name for name in models.names() if name.endswith(".keras") and not name.startswith(".")]
            if len(files) == 1 and models.expect(files[0], FILE):
                return models.path / files[0]
    if not files:
        raise DataError(f"{folder.path}: the sweep has kept no model; --keep best keeps those of its best trial")
    names = ", ".join(f"{MODELS}/{name}" for name in files[:3]) + (", ..." if len(files) > 3 else "")
    raise DataError(f"{folder.path}: the sweep has kept {len(files)} models: name one of {names}")
