"""The command line: one module a subcommand, the configuration, and the run directory."""
