"""The command line: subcommands, the configuration, and the run directory."""
