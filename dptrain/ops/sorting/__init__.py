"""Sorting, searching, counting; what follows from sorted vectors."""
