"""`benchmarks/gpu.py` where there is no CUDA device."""

import importlib
import sys

import pytest
import torch
from helpers import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA only")
def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick"])
    importlib.import_module("gpu").main()
    assert capsys.readouterr().out == "no CUDA device here: nothing is measured\n"
