"""Install hints for optional packages: the extras of pyproject.toml, once."""

import shlex

# By extra of pyproject.toml. Hints name the packages, because dptrain itself is installed from a clone, under no name
# that pip would find.
_REQUIREMENTS = {
    "mpich": ("mpich>=4.2",),
    "plots": ("matplotlib>=3.8",),
    "report": ("jinja2>=3.1", "matplotlib>=3.8"),
    "tensorboard": ("tensorboardX",),
    "mlflow": ("mlflow-skinny>=2.14",),
    "wandb": ("wandb>=0.17",),
    "sweep": ("scipy>=1.11", "matplotlib>=3.8"),
    "optuna": ("optuna>=3.6", "scikit-learn>=1.4"),
    "onnx": ("onnx>=1.16",),
    "tables": ("pandas>=2.2", "pyarrow>=14"),
    "streams": ("fsspec[http]>=2024.2", "pyarrow>=14"),
    "images": ("pillow>=12.1.1",),
    "metrics": ("prometheus_client>=0.20",),
    "serve": ("starlette>=0.37", "uvicorn>=0.30", "prometheus_client>=0.20"),
    "cuda": ("pycuda>=2026.1",),
    "cuda-toolkit": ("cuda-toolkit[cccl,nvcc,profiler]>=13.0,<14",),
    "nccl": ("pycuda>=2026.1", "nccl4py[cu12]>=0.6"),
    "cudnn": ("pycuda>=2026.1", "nvidia-cudnn-frontend>=1.32", "nvidia-cudnn-cu13>=9.20"),
    "cublaslt": ("pycuda>=2026.1", "nvmath-python[cu12]>=1.0"),
}


def pip_install(extra: str) -> str:
    """Return the shell command that installs an extra's packages."""
    return shlex.join(["pip", "install", *_REQUIREMENTS[extra]])
