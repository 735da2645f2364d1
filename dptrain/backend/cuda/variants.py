"""Ways to do the same that hardware has to choose between: defaults, and others for whoever measures.

`DPTRAIN_CUDA_VARIANTS="dependent=1,columns=8"` changes them for a process. What is computed is the same.
"""

import os
from dataclasses import dataclass, fields, replace

from dptrain.errors import ConfigError

_VARIABLE = "DPTRAIN_CUDA_VARIANTS"
_COLUMNS = (8, 16)


@dataclass(frozen=True)
class Variants:
    """How programs are launched and compiled.

    Attributes:
        direct: a training step's kernels have addresses as parameters, instead of reading them from a table of runs;
            then other data record other graphs.
        dependent: a kernel of a graph is launched before the one in front of it has ended (programmatic dependent
            launch), from compute capability 9.0 on.
        columns: of float32's largest tiles, so many of whose columns and eight rows a thread sums up.
        grouped: float32's smallest tiles, where they are few, are each computed by four groups of threads.
    """

    direct: bool = False
    dependent: bool = False
    columns: int = 16
    grouped: bool = True


def chosen_variants(text: str | None = None) -> Variants:
    """Return the defaults, changed as a text says.

    Args:
        text: as above; None for the environment's.

    Raises:
        ConfigError: it names none of them, or no number.
    """
    text = os.environ.get(_VARIABLE, "") if text is None else text
    known = {one.name: type(getattr(Variants(), one.name)) for one in fields(Variants)}
    changes: dict[str, int] = {}
    for change in filter(None, text.split(",")):
        name, _, value = change.partition("=")
        if name not in known or not value.isdecimal():
            raise ConfigError(f"{_VARIABLE}={change!r}: expected NAME=NUMBER, with a name of {', '.join(known)}")
        changes[name] = known[name](int(value))
    if changes.get("columns", 8) not in _COLUMNS:
        raise ConfigError(f"{_VARIABLE}={text!r}: columns is one of {_COLUMNS}")
    return replace(Variants(), **changes)  # type: ignore[arg-type]
