"""The command line in a folder that somebody else made."""

import pathlib
import subprocess
import sys

import pytest
from helpers import PATIENCE

MODULE = "open('ran', 'a').write(__name__ + ' ')\nclass Store: pass\n"


@pytest.mark.parametrize(
    ("command", "file", "told"),
    [
        (["-m", "stream_dataloader"], "a.md", 0),
        pytest.param(["-mstream_dataloader"], "a.md", 0, marks=pytest.mark.slow),
        pytest.param([pathlib.Path(sys.executable).parent / "stream-dataloader"], "b.h5", 1, marks=pytest.mark.slow),
    ],
    ids=["-m", "-mname", "script"],
)
def test_modules_and_entry_points_beside_the_data_are_not_run(tmp_path, command, file, told):
    (package := tmp_path / "other-1.dist-info").mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[stream_dataloader.stores]\nother = other_format:Store\n")
    for name in ("other_format", "h5py", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "a.md").write_text("hello")
    (tmp_path / "b.h5").write_text("hello")
    command = [sys.executable, *command, "inspect", file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=PATIENCE, check=False)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert (done.returncode > 0, done.stdout == b"") == (told, told), done


def test_a_program_that_is_run_by_name_keeps_its_own_folder(tmp_path):
    (program := tmp_path / "program").mkdir()
    (program / "__init__.py").write_text("import stream_dataloader\nimport beside_it")
    (program / "__main__.py").write_text("")
    (tmp_path / "beside_it.py").write_text("")
    subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path, check=True, timeout=PATIENCE)
