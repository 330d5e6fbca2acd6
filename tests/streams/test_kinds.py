"""Pipes, sockets and devices are refused at once: who opens a pipe to look at it waits, or cuts off its writer."""

import os
import socket
import threading

import pytest
from helpers import PATIENCE

from stream_dataloader import StreamDataLoader, StreamDataset, StreamError
from stream_dataloader.streams import ArrayStream, AudioStream, ImageFolderStream, TextStream, VideoStream

FACTORIES = {
    "video": VideoStream(),
    "opencv": VideoStream(backend="opencv"),
    "audio": AudioStream(window=100),
    "array": ArrayStream(),
    "text": TextStream(),
    "images": ImageFolderStream(),
}


def fails(factory, source, message):
    """Open and read in a thread, which a pipe would hold up for ever."""
    found = []

    def read():
        try:
            list(StreamDataLoader(StreamDataset([source], factory, 1, time_steps=1)))
        except StreamError as error:
            found.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for a writer"
    assert message in found[0]


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_pipe_is_refused_and_its_writer_is_not_cut_off(tmp_path, kind):
    pipe = tmp_path / "0.png"
    os.mkfifo(pipe)
    source = str(tmp_path if kind == "images" else pipe)
    with_writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(with_writer, b"data")
        fails(FACTORIES[kind], source, f"{pipe} is a pipe")
        assert os.read(with_writer, 9) == b"data"
    finally:
        os.close(with_writer)


def test_a_pipe_without_a_writer_a_socket_and_a_device(tmp_path):
    os.mkfifo(tmp_path / "a.mp4")
    fails(VideoStream(), str(tmp_path / "a.mp4"), "is a pipe (FIFO)")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        fails(VideoStream(), str(tmp_path / "socket"), "socket is a socket, which")
    fails(AudioStream(window=10), "/dev/zero", "/dev/zero is a device, which")
