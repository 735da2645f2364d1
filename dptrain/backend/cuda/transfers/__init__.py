"""What moves data between GPUs, and between a GPU and the host."""
