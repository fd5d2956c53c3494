"""What the tests of faults share."""

import pathlib

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> pathlib.Path:
    """Compiled programs, shared by all processes of the session."""
    return tmp_path_factory.mktemp("compiled")
