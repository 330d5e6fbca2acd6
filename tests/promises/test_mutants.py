"""The mistakes of `mutants/` fit the code, so that they can be planted again."""

import ast

import pytest
from helpers import ROOT
from mutants import ROOMS, mutants_of


@pytest.mark.parametrize("room", ROOMS)
def test_mistakes_change_one_place_and_make_a_program(room):
    tests, mutants = mutants_of(room)
    assert all((ROOT / test).exists() for test in tests if not test.startswith("-")), tests
    problems = []
    for mutant in mutants:
        text = (ROOT / "stream_dataloader" / mutant.file).read_text(encoding="utf-8")
        try:
            ast.parse(mutant.planted(text))
        except (AssertionError, SyntaxError) as error:
            problems.append(f"{mutant.name}: {error}")
    assert not problems, "correct or replace these in mutants/:\n" + "\n\n".join(problems)
