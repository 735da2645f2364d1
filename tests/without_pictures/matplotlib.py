"""In front on PYTHONPATH, this makes Matplotlib look as if it were not installed: no run draws its curves."""

raise ImportError("tests draw pictures only where they ask for them")
