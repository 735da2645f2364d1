"""Data sets: reading files, generating, fetching, and sharing one copy a node."""
