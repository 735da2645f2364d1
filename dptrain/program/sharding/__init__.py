"""Where tensors lie on a mesh of ranks, and the collectives that follow."""
