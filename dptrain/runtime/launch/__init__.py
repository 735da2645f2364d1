"""Starts the ranks of a job, and says what a launcher has told this process."""
