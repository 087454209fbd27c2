"""Reads the files of a latent set by offset, from a folder, a web server, or any store that fsspec
opens.

A remote source tries again after 0.2, 0.4, 0.8 … seconds, or when the server says, if a read may
succeed later (a timeout, a broken connection, status 408, 429 or 5xx). In the end it raises an
OSError whose text says why. No text shows the user, the password or the query of a URL: they may be
secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError
from common.text import first_line

LONGEST_TIMEOUT = 86_400.0
LONGEST_PAUSE = 30.0
FIRST_PAUSE = 0.2


class Source(Protocol):
    """The files of one latent set. A source opens nothing before the first read, so worker
    processes can inherit it."""

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """`size` bytes at `offset` of file `name`, or all of it; fewer if the file ends there.

        FileNotFoundError if there is no such file, OSError if it cannot be read.
        """
        ...

    def forget(self, name: str) -> bool:
        """Drops the local copy of `name`; True if the source can fetch it again. Most sources keep
        no copies."""
        return False


def open_source(
    path: str | Path, cache: str | None = None, timeout: float = 30.0, retries: int = 5
) -> Source:
    """Opens the source at `path`, a folder or a URL; ValueError for a URL that runs commands or
    chains others.

    `timeout` is in seconds, for each connection and each pause of the server. With `cache`, the
    source fetches whole shards into that folder and reads them there. The query of an http(s) URL
    goes behind the name of each file.
    """
    if not 0.0 < timeout <= LONGEST_TIMEOUT or retries < 0:
        raise UserError(
            f"data.timeout={timeout} must be above 0 and at most {LONGEST_TIMEOUT:g} seconds, and "
            f"data.retries={retries} at least 0."
        )
    text = str(path)
    scheme = text.partition("://")[0] if "://" in text else ""
    web = scheme in ("http", "https")
    if text.startswith("pipe:") or ("::" in text and not web):
        raise UserError(
            f"data.path={shown(text)}: pipes and chained URLs are not opened; give a folder or "
            "one URL."
        )
    if not scheme:
        return LocalSource(Path(text).expanduser())
    if web and "#" in text:
        raise UserError(
            f"data.path={shown(text)} has a fragment behind a #; leave it out (a # in a name is "
            "%23)."
        )
    folder, _, query = text.partition("?")
    if query and not web:
        raise UserError(
            f"data.path={shown(text)} has a query behind a ?; only http and https have one, leave "
            "it out."
        )
    kind = HttpSource if web else FsspecSource
    source = kind(text, timeout, retries)
    return source if cache is None else CachedSource(source, Path(cache).expanduser(), folder)


def shown(url: str) -> str:
    """The URL without user, password, query and fragment; a path of a folder as it is."""
    return (
        re.sub(r"(?<=://)[^/]*@", "", url).partition("?")[0].partition("#")[0]
        if "://" in url
        else url
    )


class LocalSource(Source):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        with (self.folder / name).open("rb") as stream:
            stream.seek(offset)
            return stream.read(-1 if size is None else size)


class RemoteSource(Source):
    """Tries a read again after a transient error; a subclass adds `read_once`."""

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        folder, mark, query = url.partition("?")
        self.url = folder.rstrip("/")
        self.query = mark + query
        self.timeout = timeout
        self.retries = retries

    def __str__(self) -> str:
        return shown(self.url)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        failure = ""
        asked = 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(LONGEST_PAUSE, max(asked, FIRST_PAUSE * 2 ** (attempt - 1))))
            try:
                return self.read_once(name, offset, size)
            except TransientError as error:
                failure = str(error)
                asked = error.pause
        if asked > LONGEST_PAUSE:
            failure += (
                f" and asks for a pause of {asked:.0f} s, of which a reader waits "
                f"{LONGEST_PAUSE:.0f}"
            )
        raise OSError(f"{failure} ({self.retries + 1} attempts)")

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        raise NotImplementedError

    def told(self, error: Exception) -> str:
        """The error's type and first line, without what `shown` leaves out of a URL."""
        user = re.search(r"://([^/]*)@", self.url)
        text = first_line(error).removesuffix(".")
        for secret in filter(None, (self.query.removeprefix("?"), user and user[1])):
            text = text.replace(secret, "…")
        return f"{type(error).__name__} {text}".strip()


class TransientError(OSError):
    """An error after which another attempt may succeed, in `pause` seconds if the server said
    so."""

    def __init__(self, text: str, pause: float = 0.0) -> None:
        super().__init__(text)
        self.pause = pause


class HttpSource(RemoteSource):
    """A folder on a web server that answers range requests (RFC 9110, section 14)."""

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        super().__init__(url, timeout, retries)
        self.client: Any = None
        self.owner = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"client": None}

    def connection(self) -> Any:
        """One client per process, because connections do not survive a fork."""
        import httpx

        if self.client is None or self.owner != os.getpid():
            if self.query or "@" in self.url:
                logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each URL
            self.client = httpx.Client(timeout=self.timeout, follow_redirects=True)
            self.owner = os.getpid()
            weakref.finalize(self, self.client.close)
        return self.client

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        import httpx

        part = {} if size is None else {"Range": f"bytes={offset}-{offset + size - 1}"}
        headers = {"Accept-Encoding": "identity"} | part
        try:
            with self.connection().stream(
                "GET", f"{self.url}/{name}{self.query}", headers=headers
            ) as reply:
                self.check(reply, size is not None)
                return reply.read() if size is None else part_of(reply, offset, size)
        except OSError:
            raise
        except httpx.TransportError as error:
            kind = OSError if isinstance(error, httpx.UnsupportedProtocol) else TransientError
            raise kind(self.told(error)) from error
        except (
            Exception
        ) as error:  # a bad URL, redirect, encoding or proxy: each has an error of its own
            raise OSError(self.told(error)) from error

    def check(self, reply: Any, in_part: bool) -> None:
        """Raises for a reply that is not the file, or the part of it that was asked for."""
        status = reply.status_code
        headers = reply.headers
        if status in (408, 429) or status >= 500:
            raise TransientError(
                f"the server answers {status}", pause_in(headers.get("Retry-After", ""))
            )
        if status in (404, 410):
            raise FileNotFoundError(f"the server answers {status}")
        if status == 416:
            raise OSError("the file ends before that place")
        if status not in (200, 206):
            raise OSError(f"the server answers {status}")
        if headers.get("Content-Type", "").lower().startswith("text/html"):
            raise OSError(
                "the server answers with a web page instead of the file, such as one to log in"
            )
        if status == 200 and in_part:
            raise OSError("the server does not send parts of files; set data.cache=<folder>")
        if (
            in_part
            and (encoding := headers.get("Content-Encoding", "identity").lower()) != "identity"
        ):
            raise OSError(
                f"the server sends parts of files compressed ({encoding}); set data.cache=<folder>"
            )


def part_of(reply: Any, offset: int, size: int) -> bytes:
    """The body of a 206 reply; OSError if it is another part than asked, before more than that is
    in memory."""
    pieces = []
    length = 0
    for piece in reply.iter_bytes():
        length += len(piece)
        if length > size:
            raise OSError(f"the server sends more than the {size} bytes that were asked for")
        pieces.append(piece)
    told = reply.headers.get("Content-Range")
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", told or "")
    ends = found is not None and found[3] == str(offset + length)
    if told is not None and (
        not found or int(found[1]) != offset or int(found[2]) + 1 != offset + length
    ):
        raise OSError(
            f"the server sends {length} bytes as {told!r}, and {size} bytes from {offset} were "
            "asked for"
        )
    if found and length < size and not ends:
        raise OSError(
            f"the server sends {length} of the {size} bytes that were asked for, and the file "
            "goes on"
        )
    return b"".join(pieces)


def pause_in(retry_after: str) -> float:
    """Seconds of a Retry-After header: a number or a date (RFC 9110, section 10.2.3); 0 if it is
    neither."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


class FsspecSource(RemoteSource):
    """s3://, gs://, hf:// and whatever else fsspec has an implementation for; the store sets its
    own timeouts."""

    def filesystem(self) -> Any:
        """The store and the folder in it."""
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.url)
        except ValueError as error:  # no such scheme
            raise ImportError(str(error)) from error

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        try:
            filesystem, folder = self.filesystem()
            end = None if size is None else offset + size
            return filesystem.cat_file(f"{folder}/{name}", start=offset or None, end=end)
        except FileNotFoundError:
            raise
        except ImportError as error:  # no implementation of the scheme
            raise OSError(f"{error}; install what fsspec asks for") from error
        except Exception as error:  # each store has errors of its own
            raise TransientError(self.told(error)) from error


class CachedSource(Source):
    """Keeps copies of whole shards in `folder`/<hash of the URL>; reads other files from `source`
    each time.

    The hash is of the URL without its query, so a renewed token finds the copies.
    Threads and processes may share a cache: each fetches to a temporary name of its own and
    renames.
    """

    def __init__(self, source: RemoteSource, folder: Path, url: str) -> None:
        self.source = source
        self.folder = folder / hashlib.sha256(url.encode()).hexdigest()[:16]
        self.fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.seen: dict[str, int] = {}
        """Inode of each copy at the last read."""

    def __str__(self) -> str:
        return str(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"fetching": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"fetching": defaultdict(threading.Lock)}

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        if not name.endswith(".tar"):
            return self.source.read(name, offset, size)
        while True:
            with self.fetching[name]:
                if not (self.folder / name).is_file():
                    self.fetch(name)
            try:
                with (self.folder / name).open("rb") as stream:
                    self.seen[name] = os.fstat(stream.fileno()).st_ino
                    stream.seek(offset)
                    return stream.read(-1 if size is None else size)
            except FileNotFoundError:
                continue  # another process found the copy damaged and dropped it

    def fetch(self, name: str) -> None:
        content = self.source.read(name)
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=self.folder, prefix=f"{name}.", delete=False
            ) as stream:
                temporary = Path(stream.name)
                stream.write(content)
            temporary.replace(self.folder / name)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise UserError(
                f"data.cache: {self.folder} cannot take {name}, {len(content) / 2**20:.0f} MiB "
                f"({error.strerror}); free some space, choose another folder, or leave data.cache "
                "out."
            ) from error

    def forget(self, name: str) -> bool:
        """Drops only the copy that this process read; another process may have fetched a better one
        since."""
        file = self.folder / name
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ino == self.seen.get(name):
                file.unlink()
        return True


def unreadable(what: str, error: OSError) -> str:
    """One sentence for a failed read: `what` is missing, or the reason why it cannot be read."""
    if not isinstance(error, FileNotFoundError):
        return f"{what} cannot be read: {error}"
    reason = f" ({error})" if "server" in str(error) else ""
    return f"{what} is missing{reason}"
