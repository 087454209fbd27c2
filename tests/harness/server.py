"""A web server of a folder on the loopback device whose answers a test chooses."""

import http.server
import threading


class Server(http.server.ThreadingHTTPServer):
    """Sends files of a folder, whole or in parts."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.script = lambda number, path: None
        """Decides about each request: a status to answer, "hang", "cut", None for an honest answer,
        or a function that answers itself."""
        self.requests = []
        self.ranges = True
        self.released = threading.Event()

    def handle_error(self, request, client_address):
        """Ignores clients that leave early."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        server = self.server
        server.requests.append(self.path)
        part = self.headers.get("Range", "")
        verdict = server.script(len(server.requests), f"{self.path} {part}".strip())
        file = server.folder / self.path.partition("?")[0].lstrip("/")
        if callable(verdict):
            verdict(self)
        elif verdict == "hang":
            server.released.wait(20.0)
        elif isinstance(verdict, int):
            reply(verdict)(self)
        elif not file.is_file():
            reply(404)(self)
        else:
            self.send_file(file.read_bytes(), part if server.ranges else "", verdict == "cut")

    def send_file(self, content, part, cut):
        """Sends all of a file, or the `part` of a Range header; a `cut` reply breaks off in the
        middle."""
        if part:
            first, last = map(int, part.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut

    def log_message(self, *arguments):
        """Keeps requests out of the tests' output."""


def reply(status, content=b"", **headers):
    """Makes an answer with headers that need not be true; `_` in their names stands for `-`."""

    def send(handler):
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return send
