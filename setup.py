"""Lets tools that still call setup.py install paddle_dp; everything is said in pyproject.toml."""

from setuptools import setup

setup()
