"""Reads live cameras side by side, each a lane, and prints how far they are and what was left out.

    python examples/camera.py [URL ...] [--batches 5]

A camera is an index (0, 1, ...), a device or a URL (rtsp, http, udp, ...). Without any, two small ones are
served on this machine.
"""

import argparse
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import CameraStream


class Camera(BaseHTTPRequestHandler):
    """Serves MJPEG, 25 pictures a second, as plain network cameras do: a bar that goes from left to right."""

    def do_GET(self) -> None:
        """Send pictures until no client listens."""
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=picture")
        self.end_headers()
        while True:
            picture = np.zeros((120, 160, 3), np.uint8)
            picture[:, int(time.time() * 25) % 160] = 255
            data = cv2.imencode(".jpg", picture)[1].tobytes()
            try:
                self.wfile.write(b"--picture\r\nContent-Type: image/jpeg\r\n")
                self.wfile.write(b"Content-Length: %d\r\n\r\n%b\r\n" % (len(data), data))
            except OSError:
                return
            time.sleep(1 / 25)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Print what each batch holds."""
    parser = argparse.ArgumentParser(description="Reads live cameras, each a lane.")
    parser.add_argument("cameras", nargs="*")
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Camera)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = [f"http://127.0.0.1:{server.server_port}/{name}.mjpg" for name in ("left", "right")]
    cameras = [int(camera) if camera.isdigit() else camera for camera in options.cameras or own]

    # Each camera has its own lane and worker, so that none waits for another. A live picture cannot be read twice, and
    # the camera that answers first gets the first lane, so this cannot be deterministic.
    open_camera = CameraStream(size=(60, 80), layout="CHW", fps=10)
    dataset = StreamDataset(cameras, open_camera, len(cameras), time_steps=5, deterministic=False)
    loader = StreamDataLoader(dataset, num_workers=len(cameras))
    for batch in loader:
        frames, dropped = batch.data["frame"], batch.data["dropped"].sum(0)
        age = time.time() - batch.data["time_seconds"][-1].max().item()
        print(f"batch {batch.batch_index}: {tuple(frames.shape)}, dropped {dropped.tolist()}, {1000 * age:.0f} ms old")
        if batch.batch_index + 1 == options.batches:
            break  # cameras are endless
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
