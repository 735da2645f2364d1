"""A stand-in for the parts of nccl4py that dptrain/comm/nccl.py calls; see core/__init__.py."""
