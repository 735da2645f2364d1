"""A page about a run: how good its model is, on what, and beside what; `page` writes it as report.html."""
