"""Tests of the documentation: its code, its reference, its lists."""
