"""What the command line takes: the configuration, its options and their words."""
