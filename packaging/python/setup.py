import pathlib
import runpy

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Programs(Distribution):
    """A distribution for one platform, although it has no extension module."""

    def has_ext_modules(self):
        return True


class ProgramWheel(bdist_wheel):
    """A wheel for every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


BUILD = runpy.run_path(str(pathlib.Path(__file__).parent / "lockstep/_build.py"))
setup(version=BUILD["version"], install_requires=[f"torch=={BUILD['torch_version']}"],
      distclass=Programs, cmdclass={"bdist_wheel": ProgramWheel})
