"""What the C++ and CUDA generators share: loop fusion, views, index expressions, memory planning."""
