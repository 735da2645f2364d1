"""A step as data: tensors, traces, the reverse pass, and where each tensor lies on the ranks.

`docs/program.md` explains it with an example. Read in this order: `shapes`, `tensor`, `gradient`, `program`,
`placement`, `messages`, `evaluate`.
"""
