"""Files, folders, locks and caches that others may share."""
