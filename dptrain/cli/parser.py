"""The argument parser of all subcommands."""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dptrain.cli.words import suggest
from dptrain.errors import ConfigError
from dptrain.runtime.launcher import detect_launch


@dataclass(frozen=True)
class Options:
    """The command line of a subcommand that is no training: its module has one, called OPTIONS.

    Attributes:
        description: what it does, a line.
        add: adds its own options.
        fields: paths of those fields of a run's configuration that are options here as well.
        usage: what follows the command.
    """

    description: str
    add: Callable[[argparse.ArgumentParser], None]
    fields: Collection[str] = ()
    usage: str = "RUN [options]"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours, and whose help is printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse arguments.

        Raises:
            ConfigError: an unknown option, or one without its value.
        """
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            # An option has two names: whoever writes a group means the one with its group.
            if not name.startswith("-"):
                raise ConfigError(f"unknown {unknown[0]!r}; options begin with --, and a command comes first")
            alike = [option for option in known if ("." in option) == ("." in name)]
            raise ConfigError(f"unknown {unknown[0]!r}{suggest(name, alike, known)}")
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        launch = detect_launch()
        if launch is None or launch.rank == 0:
            super()._print_message(message, file)
