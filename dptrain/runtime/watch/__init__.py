"""Ranks watch each other, and end a job that would hang."""
