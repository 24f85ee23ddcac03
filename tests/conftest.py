"""Loads shared fixtures, and imports no PyTorch in a process that only distributes tests."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load fixtures in workers of pytest-xdist, or in a process without workers."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        gc.disable()  # until all is collected: nothing is garbage yet
        config.pluginmanager.import_plugin("tests.fixtures")
