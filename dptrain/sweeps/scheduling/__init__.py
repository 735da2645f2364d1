"""Which runs are trained when, on which rank, and how many beside each other."""
