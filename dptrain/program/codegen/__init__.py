"""What the generators of C++ and CUDA share: fused loops, views, index expressions, the plan of memory."""
