"""Standard streams, terminals and progress bars."""
