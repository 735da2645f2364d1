"""The argument parser of all subcommands."""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dptrain.cli.options.words import suggest
from dptrain.errors import ConfigError
from dptrain.runtime.launch.launcher import detect_launch


@dataclass(frozen=True)
class Options:
    """Options of a subcommand other than training; its module has one as OPTIONS."""

    description: str  # one line
    add: Callable[[argparse.ArgumentParser], None]  # adds its own options
    fields: Collection[str] = ()  # paths of run configuration fields that are options, too
    usage: str = "RUN [options]"  # what follows the command


class Gathered(argparse.Action):
    """Joins the lists of an option that is repeated, by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add to what the option has listed before."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our errors and prints help on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        raise ConfigError(message)

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse arguments; refuse unknown options, and those without their value."""
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            # An option has two names: with a group in the word, only those with a group match.
            if not name.startswith("-"):
                if "--grid" in options and "=" in unknown[0]:
                    raise ConfigError(f"unknown {unknown[0]!r}; repeat --grid: --grid {unknown[0]}")
                raise ConfigError(f"unknown {unknown[0]!r}; options begin with --, and a command comes first")
            alike = [option for option in options if ("." in option) == ("." in name)]
            raise ConfigError(f"unknown {unknown[0]!r}{suggest(name, alike, options)}")
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        launch = detect_launch()
        if launch is None or launch.rank == 0:
            super()._print_message(message, file)
