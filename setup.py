"""Maps conf/ to the package grpo_cli.conf, which setup.cfg alone cannot say; everything else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "grpo_cli.conf"],
    package_dir={"": "src", "grpo_cli.conf": "conf"},
    package_data={"grpo_cli": ["*.jinja"], "grpo_cli.conf": ["*.yaml", "**/*.yaml"]},
)
