"""From what users pass to `fit`, `evaluate` and `predict` to rows on the device."""
