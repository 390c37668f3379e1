"""Packaging: pyproject.toml says everything."""

from setuptools import setup

setup()
