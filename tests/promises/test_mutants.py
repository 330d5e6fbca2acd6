"""The mutants of `mutants.py` fit the code, so that they can be run again."""

import ast

import pytest
from helpers import ROOT
from mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_place_and_is_a_program(name):
    mutant = MUTANTS[name]
    text = (ROOT / "stream_dataloader" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    assert (ROOT / mutant.tests).exists()
