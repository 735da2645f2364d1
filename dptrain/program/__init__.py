"""A step as data: tensors, traces, the reverse pass, and where each tensor lies on the ranks.

`docs/program.md` explains it with an example. Read in this order: `shapes`, `tensor`, `op`, `gradient`, `program`,
`execute`; then the rooms that work on a traced program:

- `sharding`: placements of tensors on a mesh of ranks, and the collectives that follow.
- `pipeline`: layers divided into stages, and microbatches in 1F1B order.
- `codegen`: what the C++ and CUDA generators share: fused loops, views, index expressions, the plan of memory.
- `cost`: operations, bytes, messages, memory and time of a step on given hardware.
"""
