"""Builds the native CPU kernels at install where a compiler is at hand; everything else is in pyproject.toml.

An installation without them works: the library is then compiled on first use, or torch code serves. So nothing here
fails an install.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_spec = importlib.util.spec_from_file_location("kernels_cpu_build", Path(__file__).parent / "kernels/cpu/build.py")
assert _spec is not None and _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


class BuildKernels(build_ext):
    """Compiles by `kernels/cpu/build.py`: one plain shared library, no Python extension."""

    def build_extension(self, ext: Extension) -> None:
        try:
            build.compile_library(Path(self.get_ext_fullpath(ext.name)).resolve(), build.find_compiler())
        except build.BuildError as error:
            self.warn(f"no native kernels in this build: {error}")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / build.installed_library().name)


setup(
    ext_modules=[Extension("kernels.cpu.liboctavo", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
