"""Live cameras on loopback, which send at real time: MPEG-TS and MJPEG over HTTP, H.264 over RTSP.

Picture n is one grey all over, `shade(n)`; its time stamp is n / rate.
"""

import contextlib
import itertools
import socket
import socketserver
import threading
import time
import wave

import av
import cv2
import numpy as np

BOUNDARY = b"picture"


def shade(number):
    return 8 + number % 24 * 10


def number_of(value):
    return round((float(value) - 8) / 10) % 24


class _Sender:
    """A file to be muxed to; each write is one call of `send`."""

    def __init__(self, send):
        self.write = lambda data: (send(bytes(data)), len(data))[1]


class _Encoder:
    """H.264 without delay, muxed to a container."""

    def __init__(self, container, camera):
        self.container = container
        self.stream = container.add_stream("libx264", rate=camera.rate)
        self.stream.options = {"preset": "ultrafast", "tune": "zerolatency", "g": "10"}
        self.stream.height, self.stream.width = camera.size
        self.stream.pix_fmt = "yuv420p"

    def send(self, number):
        frame = av.VideoFrame(self.stream.width, self.stream.height, "gray")
        np.frombuffer(frame.planes[0], np.uint8)[:] = shade(number)
        frame.pts = number
        self.container.mux(self.stream.encode(frame.reformat(format="yuv420p", dst_color_range=1)))


class CameraServer(socketserver.ThreadingTCPServer):
    """A camera, as a context manager; ends all connections when it is left.

    Args:
        port: Listens here; 0: anywhere.
        rate: Pictures a second.
        size: Height and width; read for each connection.
        first: The number of the first picture.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port=0, rate=50, size=(48, 64), first=0):
        self.rate, self.size, self.first = rate, size, first
        self.began, self.skipped = time.monotonic(), 0
        self.connections, self.connected = set(), 0
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)
        self.port = self.server_address[1]

    def url(self, path="live.ts", scheme="http"):
        return f"{scheme}://127.0.0.1:{self.port}/{path}"

    def numbers(self):
        """The pictures' numbers, each when it is due."""
        number = self.first + int((time.monotonic() - self.began) * self.rate)
        while True:
            due = self.began + (number - self.first) / self.rate
            if self.closing.wait(max(0.0, due - time.monotonic())):
                return
            if self.skipped:
                self.skipped -= 1
            else:
                yield number
            number += 1

    def drop(self):
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.005,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.shutdown()
        self.thread.join()
        # A worker forked meanwhile has the listening socket, too: the kernel would go on to connect whoever calls, and
        # the caller would wait for an answer as long as its time limit says.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.drop()
        self.server_close()
        while self.connections:
            time.sleep(0.005)


class _Handler(socketserver.StreamRequestHandler):
    def setup(self):
        super().setup()
        self.server.connected += 1
        self.server.connections.add(self.request)

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
        self.server.connections.discard(self.request)

    def handle(self):
        with contextlib.suppress(OSError, av.error.FFmpegError):
            while request := self.read_request():
                if request[0] != "GET":
                    self.answer_rtsp(*request)
                    continue
                path = request[1].rpartition("/")[2]
                getattr(self, f"send_{path.replace('.', '_')}", self.send_missing)()
                return

    def read_request(self):
        method, _, rest = self.rfile.readline().decode().partition(" ")
        headers = {}
        while line := self.rfile.readline().strip().decode():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return (method, rest.split(" ")[0], headers) if rest else None

    # HTTP

    def say(self, status, kind):
        self.wfile.write(f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\n\r\n".encode())

    def send_missing(self):
        self.say("404 Not Found", "text/plain")

    def send_text(self):
        self.say("200 OK", "text/plain")
        self.wfile.write(b"no video, " * 1000)

    def send_sound(self):
        self.say("200 OK", "audio/wav")
        with wave.open(self.wfile, "wb") as sound:
            sound.setparams((1, 2, 8000, 8000, "NONE", None))
            sound.writeframes(bytes(16000))

    def send_silent(self):
        self.server.closing.wait()

    def send_live_ts(self, pictures=None):
        self.say("200 OK", "video/mp2t")
        with av.open(_Sender(self.wfile.write), "w", format="mpegts", options={"flush_packets": "1"}) as container:
            encoder = _Encoder(container, self.server)
            for number in itertools.islice(self.server.numbers(), pictures):
                encoder.send(number)

    def send_short_ts(self):
        self.send_live_ts(pictures=30)

    def send_stalling_ts(self):
        self.send_live_ts(pictures=30)
        self.server.closing.wait()

    def send_live_mjpg(self):
        self.say("200 OK", f"multipart/x-mixed-replace; boundary={BOUNDARY.decode()}")
        for number in self.server.numbers():
            picture = cv2.imencode(".jpg", np.full((*self.server.size, 3), shade(number), np.uint8))[1].tobytes()
            head = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(picture)
            self.wfile.write(b"--" + BOUNDARY + b"\r\n" + head + picture + b"\r\n")

    # RTSP (RFC 2326), with RTP between the answers on the one connection (10.12)

    def answer_rtsp(self, method, address, headers):
        body, more = "", ""
        if method == "OPTIONS":
            more = "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
        elif method == "DESCRIBE":
            body = (
                "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\nc=IN IP4 0.0.0.0\r\n"
            )
            body += "a=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\na=control:video\r\n"
            more = f"Content-Base: {address}/\r\nContent-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
        elif method == "SETUP":
            more = "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n"
        self.wfile.write(f"RTSP/1.0 200 OK\r\nCSeq: {headers['cseq']}\r\n{more}\r\n{body}".encode())
        if method == "PLAY":
            self.send_rtp()

    def send_rtp(self):
        def send(packet):
            channel = packet[1] in range(200, 205)  # a report (RTCP), and not a picture's
            self.wfile.write(b"$" + bytes([channel]) + len(packet).to_bytes(2, "big") + packet)

        with av.open(_Sender(send), "w", format="rtp", options={"packetsize": "1200"}) as container:
            encoder = _Encoder(container, self.server)
            for number in self.server.numbers():
                encoder.send(number)
