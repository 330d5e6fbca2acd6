"""A stand-in for CUDA devices, for tests of loaders that copy to one."""

import pytest
from cuda_machine import Machine


@pytest.fixture
def cuda(monkeypatch):
    return Machine().install(monkeypatch)
