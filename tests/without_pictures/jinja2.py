"""In front on PYTHONPATH, this makes Jinja2 look as if it were not installed: no run writes its page."""

raise ImportError("tests write pages of runs only where they ask for them")
