"""Training: the replica on its device, the loop over steps, the callbacks."""
