"""The code on the pages runs and prints what the pages say; links lead somewhere; the site is built without network."""

import ast
import difflib
import importlib.metadata
import inspect
import json
import os
import re
import runpy
import subprocess
import sys

import av
import numpy as np
import pytest
from helpers import ROOT

import stream_dataloader
from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, errors, recurrent, stores, streams
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.recurrent.varlen import Segments

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)

#: Blocks that cannot run here, by page, and why. They are marked `py` instead of `python`.
CANNOT_RUN = {
    "docs/concepts/ranks.md": "needs several processes",
    "docs/guides/video.md": "needs cameras in the network",
    "docs/guides/memory.md": "needs lerobot; examples/robot_memory.py is the like",
    "docs/guides/conventions.md": "needs torchrl, transformers or kernels for a GPU",
    "docs/guides/trainers.md": "needs Lightning, Accelerate and transformers; tests/integrations runs it",
    "docs/guides/arrays.md": "needs a store in the network",
    "docs/guides/shards.md": "needs the package datasets; tests/integrations runs it",
    "docs/guides/map-style.md": "needs mmengine; tests/integrations runs it",
    "docs/guides/robots.md": "needs tensorflow-datasets; tests/stores/peers runs the like",
    "docs/guides/beyond-one-machine.md": "needs a Ray cluster; tests/integrations runs the like",
    "docs/ARCHITECTURE.md": "a fragment of a user's test file",
}

PARTS = ("stream_dataloader", "tests", "docs", "benchmarks", "examples")
FILES = [*ROOT.glob("*"), *(path for part in PARTS for path in (ROOT / part).rglob("*"))]
NAMED = re.compile(r"`((?:[\w.-]+/)+|[\w./-]+\.(?:py|md|yml|toml|svg|cff))`")


FOR_CONTRIBUTORS = [
    "CONTRIBUTING.md",
    "stream_dataloader/_engine/README.md",
    "docs/ARCHITECTURE.md",
    "docs/internals/ways.md",
]


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS)
def test_files_and_folders_that_contributors_are_sent_to_exist(page):
    there = [f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in FILES]
    named = set(NAMED.findall((ROOT / page).read_text())) - {"site/"}
    assert len(named) > 5
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)] == []


def test_methods_that_contributors_are_sent_to_exist():
    sources = [path.read_text() for path in FILES if path.suffix == ".py" and "stream_dataloader" in path.parts]
    classes = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    methods = {(node.name, part.name) for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
    text = "".join((ROOT / page).read_text() for page in FOR_CONTRIBUTORS)
    named = set(re.findall(r"\b([A-Z]\w+)\.(\w+)", text))
    named = {(owner, name) for owner, name in named if owner in {node.name for node in classes}}
    assert len(named) > 20
    assert sorted(named - methods) == []


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks_of(page):
    """The page's blocks: language, code, and the output that follows."""
    return FENCE.findall(page.read_text())


PROGRAMS = {}
for of_page in PAGES:
    if programs_of_page := [(code, output) for kind, code, output in blocks_of(of_page) if kind == "python"]:
        PROGRAMS[name_of(of_page)] = programs_of_page

#: Runs the blocks of a page, each with names of its own and torch's first random numbers, in one process.
ONE_AFTER_ANOTHER = """
import runpy, sys, torch
first = torch.get_rng_state()
for block in sys.argv[1:]:
    torch.set_rng_state(first)
    runpy.run_path(block, run_name="__main__")
    print(end="\\f")
"""


@pytest.mark.parametrize("page", PROGRAMS)
def test_blocks_print_what_follows_them(page, programs, tmp_path):
    blocks = [tmp_path / f"block-{number}.py" for number in range(len(PROGRAMS[page]))]
    for block, (code, _) in zip(blocks, PROGRAMS[page], strict=True):
        assert re.search(r"num_workers=[1-9]", code) is None or "__main__" in code, "workers may import it"
        block.write_text(code, encoding="utf-8")
    done = programs(ONE_AFTER_ANOTHER, *blocks)
    *printed, rest = done.stdout.split("\f")
    for number, ((_, output), found) in enumerate(zip(PROGRAMS[page], printed, strict=False)):
        assert found == output, f"block {number}"
    assert (len(printed), rest, done.returncode) == (len(blocks), "", 0), done.stderr


def test_every_block_is_of_a_known_kind_and_runs_unless_there_is_a_reason():
    kinds = {name_of(page): {kind for kind, _, _ in blocks_of(page)} for page in PAGES}
    assert set().union(*kinds.values()) <= {"python", "py", "pyi", "pycon", "text", "sh", "bash"}
    shown = {name for name, found in kinds.items() if {"pyi", "pycon"} & found}  # signatures, and doctests, from code
    assert shown <= {name_of(page) for page in REFERENCE}
    assert {name for name, found in kinds.items() if "py" in found} == set(CANNOT_RUN)


def asked_of_the_package(code):
    """Yield each call of the package that can be told from names alone, as (text, callable, call)."""
    owners = {"batch": StreamBatch, "part": StreamBatch, "segments": Segments, "carry": RecurrentState}
    ours = {name: getattr(place, name) for place in (stream_dataloader, streams, recurrent) for name in place.__all__}
    for call in [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]:
        match call.func:
            case ast.Name(id=name) if name in ours:
                yield name, ours[name], call
            case ast.Attribute(value=ast.Name(id="stores"), attr=name):
                yield f"stores.{name}", getattr(stores, name), call
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in owners and name != "data":
                method = getattr(owners[owner], name)
                yield f"{owner}.{name}", method.__get__(object(), owners[owner]), call


def test_blocks_that_cannot_run_call_the_package_as_it_is():
    found = 0
    for page in PAGES:
        for code in [code for kind, code, _ in blocks_of(page) if kind == "py"]:
            for text, function, call in asked_of_the_package(code):
                positional = [one for one in call.args if not isinstance(one, ast.Starred)]
                named = {one.arg: None for one in call.keywords if one.arg}
                signature = inspect.signature(function)
                is_whole = len(positional) + len(named) == len(call.args) + len(call.keywords)
                try:
                    (signature.bind if is_whole else signature.bind_partial)(*positional, **named)
                except TypeError as error:
                    pytest.fail(f"{name_of(page)}: {text}: {error}")
                found += 1
    assert found > 20


def test_the_readme_is_short_and_pages_are_few():
    assert len((ROOT / "README.md").read_bytes()) <= 7168
    assert len(PAGES) - 1 <= 43


def test_continuous_integration_runs_the_readmes_command_for_the_tests():
    (command,) = [code for kind, code, _ in blocks_of(ROOT / "README.md") if kind == "sh" and "pytest" in code]
    (reading,) = re.findall(r'^command="\$\((.*)\)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    read = subprocess.run(["bash", "-c", reading], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert read == command


FIGURES_OF_THE_README = {
    "docs/proof.md": ["1.00 with carried state", "0.14 without"],
    "docs/guides/migration.md": ["51%", "62%"],
    "docs/guides/instead-of.md": ["48 to 54 %"],
    "docs/concepts/resume.md": ["0.3 kB", "70 bytes"],
}


@pytest.mark.parametrize("page", FIGURES_OF_THE_README)
def test_figures_at_the_top_of_the_readme_are_those_of_the_page_that_it_links_to(page):
    (line,) = [
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("- **") and page in line
    ]
    text = (ROOT / page).read_text()
    for figure in FIGURES_OF_THE_README[page]:
        assert figure in text
        assert figure.replace(" ", "") in line.replace(" ", "")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_the_table_of_a_folder_names_all_of_its_programs(folder):
    text = (ROOT / folder / "README.md").read_text()
    missing = [file.name for file in (ROOT / folder).glob("*.py") if f"`{file.name}`" not in text]
    assert missing == []


INSTALLED_FROM = [*PAGES, ROOT / "examples" / "README.md", *ROOT.glob("examples/*.py"), *DOCS.glob("*.ipynb")]


def test_extras_are_those_of_the_package_and_are_installed_from_the_clone():
    extras = set(importlib.metadata.metadata("stream-dataloader").get_all("Provides-Extra"))
    page = (DOCS / "get-started.md").read_text().split("| Extra | For |")[1].split("\n\n")[0]
    assert extras - set(re.findall(r"`(\w+)`", page)) == set()
    texts = {name_of(page): page.read_text() for page in INSTALLED_FROM if page.name != "releasing.md"}
    asked = {(name, part) for name, text in texts.items() for part in re.findall(r"pip install [^`\n]*", text)}
    assert len(asked) > 12
    assert [ask for ask in sorted(asked) if re.search(r"stream[-_]dataloader\b(?!==)", ask[1].split("&&")[0])] == []
    named = {
        (name, extra) for name, ask in asked for few in re.findall(r"'\.\[(.*?)\]'", ask) for extra in few.split(",")
    }
    assert len(named) > 8
    assert [one for one in sorted(named) if one[1] not in extras] == []


@pytest.mark.parametrize("face", [StreamDataset, StreamDataLoader])
def test_the_page_of_options_has_all_of_them(face):
    rows = [line for line in (DOCS / "reference" / "options.md").read_text().splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    taken = inspect.signature(face).parameters.values()
    assert {one.name for one in taken if one.kind is not one.VAR_KEYWORD} <= told


def test_the_page_of_errors_has_all_of_them():
    text = (DOCS / "guides" / "troubleshooting.md").read_text()
    assert [name for name in errors.__all__ if f"`{name}`" not in text] == []


def strings_of(module):
    """The strings of a module, with … for what an f-string fills in."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_the_messages_that_troubleshooting_explains_are_those_of_the_library():
    text = (DOCS / "guides" / "troubleshooting.md").read_text().split("## Errors")[0]
    cells = re.findall(r"^\| (.*?) \| ", text, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]{20,})`", cell)]
    said = "\n".join(line for module in (ROOT / "stream_dataloader").rglob("*.py") for line in strings_of(module))
    assert len(messages) > 25
    assert [message for message in messages if message not in said] == []


REFERENCE = [page for page in PAGES if "\n<!-- end -->" in page.read_text()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, programs):
    """Return the folder of what is written about the code as it is."""
    folder = tmp_path_factory.mktemp("reference")
    assert programs(DOCS / "api.py", folder).returncode == 0
    return folder


@pytest.mark.parametrize("name", ["api.txt", *(page.name for page in REFERENCE)])
def test_signatures_and_tables_of_the_reference_are_those_of_the_code(name, reference):
    now, written = ((path / name).read_text().splitlines() for path in (reference, DOCS / "reference"))
    changes = list(difflib.unified_diff(written, now, "written", "now", n=0, lineterm=""))
    assert changes == [], "is this meant? then run docs/api.py, and see releasing.md for deprecations"


@pytest.mark.parametrize("page", REFERENCE, ids=name_of)
def test_every_directive_of_the_reference_is_followed_by_what_can_be_read_without_the_site(page):
    text = page.read_text()
    bare = re.findall(r"(?<!<!--\n)^::: .*", text, re.MULTILINE)
    assert bare == [], "put it into a comment that docs/signatures.py knows, and run docs/api.py"
    assert "-->\n<!-- end" not in text, "run docs/api.py"


def test_the_site_shows_whole_docstrings_where_pages_have_tables():
    with_docstrings = runpy.run_path(str(DOCS / "site.py"))["with_docstrings"]
    for page in REFERENCE:
        text, shown = page.read_text(), with_docstrings(page.read_text())
        directives = re.findall(r"^::: .*\n(?:    .*\n)*", text, re.MULTILINE)
        assert [one for one in directives if one not in shown] == []
        assert "<!--" not in shown
        assert "```pyi" not in shown


def test_drawings_are_what_the_loader_does(tmp_path, programs):
    assert programs(DOCS / "draw.py", tmp_path).returncode == 0
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(drawn) >= 5
    assert drawn == {file.name: file.read_text() for file in (DOCS / "drawings").iterdir()}


def film_of(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.slow
def test_the_moving_picture_is_what_its_script_draws(tmp_path, programs):
    assert programs(DOCS / "grid.py", tmp_path / "grid.gif").returncode == 0
    drawn, kept = film_of(tmp_path / "grid.gif"), film_of(DOCS / "assets" / "grid.gif")
    assert drawn.shape == kept.shape
    assert len(kept) > 50
    assert np.abs(drawn - kept.astype(float)).mean() < 4  # decoders may differ in a few last bits
    assert (DOCS / "assets" / "grid.gif").stat().st_size < 1_500_000


@pytest.mark.slow
def test_the_site_is_built_without_complaint_and_needs_no_network(tmp_path):
    site = ROOT / os.environ.get("STREAM_DATALOADER_SITE", tmp_path)  # `make docs` has built one just before
    if site == tmp_path:
        pytest.importorskip("mkdocs", reason="install the extra docs")
        pytest.importorskip("mkdocstrings")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert len(pages) > 30
    front = (site / "index.html").read_text()
    assert re.findall(r'<a class="md-button[^"]*" href="?([^" >]+)', front)[:2] == ["get-started.html", "examples.html"]
    assert "importlib.util" in (site / "examples.html").read_text()  # the source of train.py
    assert 'href="tutorial.html"' in (site / "get-started.html").read_text()
    assert 'href="examples.html#trainpy"' in (site / "get-started.html").read_text()
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*href=["']?(?:https?:)?//"""
    )
    assert not any(loaded.search(page) for page in pages)


def test_the_front_page_has_buttons_an_install_line_and_facts():
    site = runpy.run_path(str(DOCS / "site.py"))
    page = (DOCS / "index.md").read_text()
    address = "https://example.org/someone/stream_dataloader"
    assert site["public_address"](f'[project.urls]\nRepository = "{address}"\n') == address
    whole = site["front_page"](page, address, "1.2.3")
    head = whole.split("![")[0]
    assert re.findall(r"\[(.*?)\]\((.*?)\)\{ \.md-button", head) == [
        ("Get started", "get-started.md"),
        ("Examples", "examples.md"),
        ("GitHub", address),
    ]
    assert "```sh\npip install ." in head
    assert "Version 1.2.3" in head
    assert "MIT licence" in head
    assert whole.startswith(page.split("\n\n")[0])
    assert whole.endswith(page.split("\n\n", 2)[2])
    assert "GitHub" not in site["front_page"](page, "", "1.2.3").split("![")[0]


def test_a_published_readme_has_no_relative_link_left():
    site = runpy.run_path(str(DOCS / "site.py"))
    readme = (ROOT / "README.md").read_text()
    text = site["with_public_links"](readme, "https://example.org/sd", "1.2.3")
    links = dict(zip(re.findall(r"\]\(([^)]+)\)", readme), re.findall(r"\]\(([^)]+)\)", text), strict=True))
    assert links["docs/assets/grid.gif"] == "https://example.org/sd/raw/v1.2.3/docs/assets/grid.gif"
    assert links["docs/get-started.md"] == "https://example.org/sd/blob/v1.2.3/docs/get-started.md"
    assert [one for one in links.values() if not one.startswith("https://")] == []
    assert {one: link for one, link in links.items() if one.startswith("http") and one != link} == {}
    assert site["version_of_package"]() == stream_dataloader.__version__


def test_links_to_examples_and_to_the_notebook_lead_to_their_pages_on_the_site():
    with_pages = runpy.run_path(str(DOCS / "site.py"))["with_pages"]
    text = "[a](../examples/train.py), [b](../../examples/README.md), [c](examples/train.py)"
    assert with_pages(text, 0) == "[a](examples.md#trainpy), [b](examples.md), [c](examples/train.py)"
    assert with_pages("[b](../../examples/README.md)", 1) == "[b](../examples.md)"
    assert with_pages("[d](tutorial.ipynb)", 0) == "[d](tutorial.md)"


def test_the_tutorials_page_has_all_cells_of_the_notebook():
    notebook = (DOCS / "tutorial.ipynb").read_text()
    page = runpy.run_path(str(DOCS / "site.py"))["tutorial_page"](notebook)
    cells = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(notebook)["cells"]]
    assert page.startswith(cells[0][0])
    assert len(cells) > 10
    assert [text for text, is_code in cells if ("```python\n" * is_code + text) not in page] == []


def test_the_navigation_is_collapsed_and_ends_with_internals():
    text = (ROOT / "mkdocs.yml").read_text()
    assert not re.findall(r"- navigation\.(?:sections|expand)$", text, re.MULTILINE)
    assert re.findall(r"^  - (.*):$", text, re.MULTILINE)[-1] == "Internals"


def test_no_page_or_program_unpickles_what_torch_saved():
    programs = [path for path in FILES if {"docs", "examples"} & {*path.parts} and path.suffix in (".py", ".ipynb")]
    texts = {path: path.read_text() for path in (*PAGES, *programs)}
    loads = [(str(path), call) for path, text in texts.items() for call in re.findall(r"torch\.load\((.*)", text)]
    assert len(loads) >= 3
    # On torch before 2.6 a file is unpickled, and runs what is in it, unless the call says otherwise.
    assert [load for load in loads if "weights_only=True" not in load[1]] == []
