"""How the program is run, and what it is run on."""

import wave

import pytest

from stream_dataloader.cli.main import main


@pytest.fixture
def run(capsys):
    """Runs the program here: the exit status, and what was printed and warned."""

    def run_main(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_main


@pytest.fixture
def write_sound():
    def write(path, samples, channels=1):
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((channels, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(2 * channels * samples))

    return write
