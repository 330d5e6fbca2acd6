"""Docstrings and comments of the package and the examples are plain English, as far as a machine can count it."""

import ast
import functools
import io
import re
import tokenize

from helpers import ROOT

FILES = sorted(path for folder in ("stream_dataloader", "examples") for path in (ROOT / folder).rglob("*.py"))
QUESTION = re.compile(r"(What|Who|Whose|Whom|Where|How|Whoever|Whatever)\b")
PHRASE = re.compile(r"\b(of which|by which|whom|whoever|nobody|so many|so much of)\b", re.IGNORECASE)
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


@functools.cache
def texts():
    """Return the place and the text of each docstring and comment."""
    found = []
    for path in FILES:
        name, code = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
                found.append((f"{name}:{getattr(node, 'lineno', 1)}", doc))
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                found.append((f"{name}:{token.start[0]}", token.string))
    return found


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [f"{place}: {text.splitlines()[0]}" for place, text in texts() if QUESTION.match(text)]
    assert not found, "begin a function's docstring with a verb, any other with a noun:\n" + "\n".join(found)


def test_phrases_that_a_reader_must_translate_are_rare():
    found = [f"{place}: {phrase}" for place, text in texts() for phrase in PHRASE.findall(text)]
    words = sum(len(text.split()) for _, text in texts())
    assert len(found) <= words / 10_000, "name the object, or make two sentences:\n" + "\n".join(found)
