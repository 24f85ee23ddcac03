"""Loads shared fixtures, and imports no PyTorch in a process that only distributes tests."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist load the fixtures, and so does a process that runs tests itself."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        gc.disable()  # until all is collected: nothing is garbage yet
        config.pluginmanager.import_plugin("tests.fixtures")
