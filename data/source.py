"""Reads the files of a latent set by offset, from a folder, a web server, or any store that fsspec opens.

A remote source tries again after 0.2, 0.4, 0.8 … seconds if a read may succeed later (a timeout, a broken connection,
status 408, 429 or 5xx). In the end it raises an OSError whose text says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

from accel.technique import first_line

LONGEST_PAUSE = 30.0
FIRST_PAUSE = 0.2


class Source(Protocol):
    """The files of one latent set. A source opens nothing before the first read, so worker processes can inherit it."""

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """`size` bytes at `offset` of file `name`, or all of it; fewer if the file ends there.

        FileNotFoundError if there is no such file, OSError if it cannot be read.
        """
        ...

    def forget(self, name: str) -> bool:
        """Drops the local copy of `name`; True if the source can fetch it again. Most sources keep no copies."""
        return False


def open_source(path: str | Path, cache: str | None = None, timeout: float = 30.0, retries: int = 5) -> Source:
    """Opens the source at `path`, a folder or a URL; ValueError for a URL that runs commands or chains others.

    `timeout` is in seconds, for each connection and each pause of the server. With `cache`, the source fetches whole
    shards into that folder and reads them there.
    """
    text = str(path)
    scheme = text.partition("://")[0] if "://" in text else ""
    if text.startswith("pipe:") or "::" in text:
        raise ValueError(f"data.path={text}: pipes and chained URLs are not opened; give a folder or one URL.")
    if not scheme:
        return LocalSource(Path(text).expanduser())
    kind = HttpSource if scheme in ("http", "https") else FsspecSource
    source = kind(text.rstrip("/"), timeout, retries)
    return source if cache is None else CachedSource(source, Path(cache).expanduser(), text)


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
        self.url, self.timeout, self.retries = url, timeout, retries

    def __str__(self) -> str:
        return self.url

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)))
            try:
                return self.read_once(name, offset, size)
            except TransientError as error:
                failure = str(error)
        raise OSError(f"{failure} ({self.retries + 1} attempts)")

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        raise NotImplementedError


class TransientError(OSError):
    """An error after which another attempt may succeed."""


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
            self.client, self.owner = httpx.Client(timeout=self.timeout, follow_redirects=True), os.getpid()
            weakref.finalize(self, self.client.close)
        return self.client

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        import httpx

        headers = {} if size is None else {"Range": f"bytes={offset}-{offset + size - 1}"}
        try:
            with self.connection().stream("GET", f"{self.url}/{name}", headers=headers) as reply:
                self.check(reply.status_code, size is not None)
                return reply.read()
        except httpx.TransportError as error:
            raise TransientError(f"{type(error).__name__} {error}".strip()) from error

    def check(self, status: int, in_part: bool) -> None:
        if status in (408, 429) or status >= 500:
            raise TransientError(f"the server answers {status}")
        if status in (404, 410):
            raise FileNotFoundError(f"the server answers {status}")
        if status == 416:
            raise OSError("the file ends before that place")
        if status == 200 and in_part:
            raise OSError("the server does not send parts of files; set data.cache=<folder>")
        if status not in (200, 206):
            raise OSError(f"the server answers {status}")


class FsspecSource(RemoteSource):
    """s3://, gs://, hf:// and whatever else fsspec has an implementation for; the store sets its own timeouts."""

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
            raise TransientError(f"{type(error).__name__} {first_line(error)}") from error


class CachedSource(Source):
    """Keeps copies of whole shards in `folder`/<hash of the URL>; reads other files from `source` each time.

    Threads and processes may share a cache: each fetches to a temporary name of its own and renames.
    """

    def __init__(self, source: RemoteSource, folder: Path, url: str) -> None:
        self.source, self.folder = source, folder / hashlib.sha256(url.encode()).hexdigest()[:16]
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
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f"{name}.", delete=False) as stream:
                temporary = Path(stream.name)
                stream.write(content)
            temporary.replace(self.folder / name)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise ValueError(
                f"data.cache: {self.folder} cannot take {name}, {len(content) / 2**20:.0f} MiB ({error.strerror}); "
                f"free some space, choose another folder, or leave data.cache out."
            ) from error

    def forget(self, name: str) -> bool:
        """Drops only the copy that this process read; another process may have fetched a better one since."""
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
