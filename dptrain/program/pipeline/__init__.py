"""Pipelines: layers divided into stages, through which microbatches go in 1F1B order."""
