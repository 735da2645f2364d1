"""A sweep's report, tables and pictures, and its progress."""
