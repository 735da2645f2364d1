"""Columns that could be meant in two ways: all of a table in one message, each with the option that settles it."""

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.data.tabular.table_options import Mend, TableOptions, option, options_of
from dptrain.errors import LIST, DataError


class UndecidedError(DataError):
    """Something in a table that could be meant in two ways, or that nothing can be learned from.

    Attributes:
        mend: options that settle it; None where no option does.
        done: what these do, for people, after the column's name.
    """

    def __init__(self, message: str, mend: Mend | None = None, done: str = "") -> None:
        super().__init__(message)
        self.mend, self.done = mend, done


@dataclass(frozen=True)
class Problem:
    """A column's problem."""

    name: str  # of the column; empty for the whole table's
    error: UndecidedError
    missing: int = 0  # values, where that is the problem
    has_words: bool = False  # such as NA, that stand for missing values

    @property
    def note(self) -> str:
        """What `--auto` does about it."""
        return f"column {self.name!r}: {self.error.done}" if self.name else self.error.done


class UndecidedTableError(DataError):
    """The problems of a table.

    Attributes:
        problems: in the order of the columns.
    """

    def __init__(self, where: str, problems: Sequence[Problem], options: TableOptions) -> None:
        super().__init__(_message(where, problems, options))
        self.problems = tuple(problems)


def _message(where: str, problems: Sequence[Problem], options: TableOptions) -> str:
    if len(problems) == 1:
        return str(problems[0].error)
    gaps = [problem for problem in problems if problem.missing]
    lines = [problem for problem in problems if problem not in gaps or len(gaps) == 1]
    texts = [str(problem.error).removeprefix(where).removeprefix(",").removeprefix(":").strip() for problem in lines]
    if len(gaps) > 1:
        shown = ", ".join(f"{problem.name} ({problem.missing:,})" for problem in gaps)
        texts.append(
            f"{len(gaps)} columns miss values: {shown}; fill them in, or use {option('missing', 'indicator')} (the "
            f"column's mean, or a category of its own), --missing mean or --missing drop (leaves out such rows)"
        )
        if words := [problem.name for problem in gaps if problem.has_words]:
            texts[-1] += f"; {option('categorical', words)} keeps words such as NA as values"
    if len(texts) == 1:
        return f"{where}: {texts[0]}"
    mends = [problem.error.mend for problem in problems if problem.error.mend is not None]
    settled = f"--auto settles them, or {options_of(mends, options)}"
    if len(mends) < len(problems):
        settled = "no option settles all of them"
    return LIST.join([f"{where}: {len(problems)} problems; {settled}", *texts])
