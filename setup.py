"""What pyproject.toml cannot say: the CUDA sources, which lie beside the package, travel inside its wheel.

Declared as a package of another folder they would turn an editable install from a line in a .pth file into an import
hook, which comes after the path: in the folder above a clone named dptrain, `import dptrain` would find the clone.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """Builds the package, and puts kernels/ into it as dptrain/_kernels."""

    def run(self) -> None:
        """Copy what a build copies, and the kernels; an editable install finds them where they are."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "dptrain", "_kernels")
            target.mkdir(parents=True, exist_ok=True)
            for pattern in ("*.cu", "*.cuh", "*.h", "*.md"):
                for source in Path("kernels").glob(pattern):
                    shutil.copy(source, target)


setup(cmdclass={"build_py": BuildWithKernels})
