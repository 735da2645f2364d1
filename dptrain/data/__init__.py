"""Data sets: reading files, generating, downloading, and sharing one copy a node."""
