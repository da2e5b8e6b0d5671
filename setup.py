"""The package is described in setup.cfg; this file lets tools that still call setup.py find it."""

from setuptools import setup

setup()
