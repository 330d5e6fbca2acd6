"""A server of files on loopback, which may go wrong as planned; to s3fs it is a bucket."""

import os
import pathlib
import socket
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from helpers import PATIENCE


class Server(ThreadingHTTPServer):
    """Serves `files`, and counts; `plan` holds what goes wrong with the next answers to GET, `puts` to PUT."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.plan, self.always = {}, [], [], None
        self.puts, self.sent = [], Counter()  # bytes of each file
        self.endings = None  # a list has answers to GET come without a length, and end before these bytes
        self.half_sent, self.go_on = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.connected, self.open = 0, set()
        self.redirects, self.headers_of = {}, {}  # by name: where it is instead; what was said to get it last

    def put(self, name, content):
        self.files[name] = content
        return f"{self.url}/{name}"

    def put_folder(self, folder):
        for name in os.listdir(folder):
            self.put(f"data/{name}", pathlib.Path(folder, name).read_bytes())
        return f"{self.url}/data"

    def count(self, method, name=""):
        return sum(asked == method and name in path for asked, path in self.requests)

    def verify_request(self, request, client_address):
        self.connected += 1
        self.open.add(request)
        return True

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def hang_up(self):
        """End the connections that clients keep."""
        for request in list(self.open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """A client that was killed is no error here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        asked = parse_qs(self.path.partition("?")[2])
        if "list-type" in asked:
            self.answer_with_a_list(asked.get("prefix", [""])[0], asked.get("delimiter", [""])[0])
        else:
            self.answer()

    def do_PUT(self):
        content, name = self.rfile.read(int(self.headers["Content-Length"])), self.path[1:].partition("?")[0]
        self.server.requests.append((self.command, self.path))
        if status := self.server.puts.pop(0) if self.server.puts else None:
            self.send_error(status)
        else:
            self.server.put(name, content)
            self.send_response(200)
            self.send_header("ETag", f'"{hash(content)}"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self):
        server, name = self.server, self.path[1:].partition("?")[0]
        server.requests.append((self.command, self.path))
        server.headers_of[name] = list(self.headers.items())
        if name in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[name])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wrong = server.always or (server.plan.pop(0) if server.plan and self.command == "GET" else None)
        if wrong == "silent":
            server.go_on.wait(PATIENCE)
            self.close_connection = True
            return
        if server.endings is not None:
            self.answer_without_a_length(server.files[name])
            return
        content = server.files.get(name)
        status = wrong if isinstance(wrong, int) else 200 if content is not None else 404
        if status != 200:
            content = b"no"
        elif wrong == "endless":
            self.answer_without_an_end()
            return
        elif (asked := self.headers.get("Range")) and wrong != "whole":
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            size, content, status = len(content), content[first : last + (wrong != "short")], 206
        if wrong == "late":
            server.half_sent.set()  # nothing of it
            server.go_on.wait(PATIENCE)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(server.files.get(name))}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(content) // 2
        server.sent[name] += len(content) if status in (200, 206) and wrong is None else 0
        self.wfile.write(content[:half])
        self.wfile.flush()
        if wrong == "cut":
            self.close_connection = True
            return
        if wrong == "slow":
            server.half_sent.set()
            server.go_on.wait(PATIENCE)
        self.wfile.write(content[half:])

    def answer_with_a_list(self, prefix, delimiter):
        """As a bucket does (ListObjectsV2), on one page."""
        bucket, found = self.path[1:].partition("?")[0].partition("/")[0], {}
        for name, content in self.server.files.items():
            key = name.removeprefix(f"{bucket}/")
            if key == name or not key.startswith(prefix):
                continue
            head, more, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if more:
                found[prefix + head + more] = "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>"
            else:
                tag = f"<Size>{len(content)}</Size><ETag>&quot;{hash(content)}&quot;</ETag>"
                tag += "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                found[key] = f"<Contents><Key>{{}}</Key>{tag}</Contents>"
        entries = "".join(text.format(key) for key, text in sorted(found.items()))
        head = f"<Name>{bucket}</Name><KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        body = f"<ListBucketResult>{head}{entries}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_without_an_end(self):
        """More and more bytes, whatever was asked for, until the client hangs up."""
        self.close_connection = True
        self.send_response(206)
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(OSError):
            for _ in range(4096):
                self.wfile.write(bytes(1 << 20))
                self.server.sent[self.path[1:]] += 1 << 20

    def answer_without_a_length(self, content):
        """Its end is marked by nothing but that the connection closes."""
        self.close_connection = True
        endings, end = self.server.endings, None
        if self.command == "GET" and endings:
            end = endings.pop(0)  # before the answer begins: who has that asks again, which another thread answers
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:end])

    def log_message(self, *args):
        pass


@contextmanager
def serving():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
        server.hang_up()
