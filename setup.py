"""Puts the shipped models and recipes into the package that is built: all else is said in pyproject.toml.

In a clone they stand beside the package, where they are read and changed; an installed package holds them itself
(`paddle_dp.part.shelf.shipped`).
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithModelsAndRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in (*Path("models").rglob("*.py"), *Path("configs").glob("*.yaml")):
                made = Path(self.build_lib, "paddle_dp", "shipped", source)
                self.mkpath(str(made.parent))
                self.copy_file(str(source), str(made))


setup(cmdclass={"build_py": BuildWithModelsAndRecipes})
