"""Reads byte ranges of a latent set's files, from a folder, a web server, or any store that fsspec
can open.

If a read from a remote source fails but may succeed later (a timeout, a broken connection, status
408, 429 or 5xx), the source retries it: at once, then after 0.4, 0.8, 1.6 … seconds, or after the
pause that the server requests. When no retries remain, the source raises an OSError with the
reason. Error messages leave out the user, the password and the query of a URL, because these may be
secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError
from urllib3.util import Retry

from common.errors import UserError
from common.text import shorten_error

LONGEST_PAUSE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
"""Seconds from which urllib3 computes the pauses between attempts to read: 0, then 2, 4, 8 … times
this number of seconds."""
URL_SECRETS = re.compile(r"(?<=://)[^/\s]*@|[?#]\S*")
"""Matches the parts of a URL that may be secret: user and password, query, fragment."""
FETCH_LOCKS: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""Path of a cached file -> lock, which ensures that only one thread of this process fetches the
file."""


class Source(Protocol):
    """Access to the files of one latent set. A source opens no connection before its first read, so
    that worker processes can inherit the source."""

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Reads `size` bytes (None: up to the file's end) of the file `name`, from byte `offset`
        on. Returns fewer bytes if the file ends before.

        Raises FileNotFoundError if the file does not exist, OSError if the read fails.
        """
        ...

    def forget(self, name: str) -> bool:
        """Deletes the local copy of the file `name`, if the source keeps local copies. Returns True
        if the source keeps local copies: the next read then fetches the file again."""
        return False


def open_source(
    path: str | Path, cache: str | None = None, timeout: float = 30.0, retries: int = 5
) -> Source:
    """Opens the source at `path`, a folder or a URL. Raises UserError for a pipe or a chain of
    URLs.

    A web server may take at most `timeout` seconds to connect, and for each pause while it sends; a
    failed read is retried up to `retries` times. If `cache` is a folder, the source copies whole
    shards into that folder and reads the copies. The query of an http(s) URL is appended to the URL
    of each file.
    """
    url = str(path)
    web = url.startswith(("http://", "https://"))
    if url.startswith("pipe:") or ("::" in url and not web):
        raise UserError(
            f"data.path={hide_secrets(url)}: pipes and chained URLs are not opened; give a folder "
            "or one URL."
        )
    if "://" not in url:
        return LocalSource(Path(url).expanduser())
    mark, part = ("#", "fragment") if web else ("?", "query")
    if mark in url:
        raise UserError(
            f"data.path={hide_secrets(url)} has a {part} behind a {mark}; leave it out."
        )
    source = (HttpSource if web else FsspecSource)(url, timeout, retries)
    return source if cache is None else CachedSource(source, Path(cache).expanduser())


def hide_secrets(text: str) -> str:
    """Removes possible secrets (user, password, query, fragment) from the URLs in a text. Returns a
    text without URLs, such as a folder's path, unchanged."""
    return URL_SECRETS.sub("", text) if "://" in text else text


def describe_error(error: Exception) -> str:
    """Returns the type and the first line of an error whose message may contain a URL; removes
    possible secrets."""
    line = URL_SECRETS.sub("", shorten_error(error)).removesuffix(".")
    return f"{type(error).__name__} {line}".strip()


def describe_failed_read(name: str, error: OSError) -> str:
    """Returns a sentence about a failed read: that the file `name` is missing, or why it cannot be
    read."""
    if not isinstance(error, FileNotFoundError):
        return f"{name} cannot be read: {error}"
    reason = f" ({error})" if "server" in str(error) else ""
    return f"{name} is missing{reason}"


@dataclass
class LocalSource(Source):
    """The files of a local folder."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        with (self.folder / name).open("rb") as stream:
            stream.seek(offset)
            return stream.read(-1 if size is None else size)


class TransientError(OSError):
    """An error after which a retry may succeed. `reply` is the server's response, which may say
    when to retry; None if there is none."""

    def __init__(self, text: str, reply: Any = None) -> None:
        super().__init__(text)
        self.reply = reply


class Pauses(Retry):
    """urllib3's computation of the pauses between attempts, limited to `LONGEST_PAUSE_SECONDS`."""

    def get_retry_after(self, response: Any) -> float | None:
        with contextlib.suppress(InvalidHeader):
            return min(LONGEST_PAUSE_SECONDS, super().get_retry_after(response) or 0.0)


class RemoteSource(Source):
    """Base of the remote sources: retries a read after a `TransientError`. A subclass adds
    `read_once`, which makes one attempt."""

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        folder, mark, query = url.partition("?")
        self.given_url = folder
        self.url = folder.rstrip("/")
        self.query = mark + query
        self.timeout = timeout
        self.retries = retries

    def __str__(self) -> str:
        return hide_secrets(self.url)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        pauses = Pauses(
            self.retries, backoff_factor=FIRST_PAUSE_SECONDS, backoff_max=LONGEST_PAUSE_SECONDS
        )
        while True:
            try:
                return self.read_once(name, offset, size)
            except TransientError as error:
                try:
                    pauses = pauses.increment(error=error)
                except MaxRetryError:
                    raise OSError(f"{error} ({self.retries + 1} attempts)") from error
                pauses.sleep(error.reply)

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        raise NotImplementedError


@cache
def make_web_client(process: int) -> Any:
    """Makes the web client (a requests session) of the process with the id `process`, and caches
    it. The id is the cache's key, so that a forked process makes its own client: it cannot use its
    parent's connections."""
    import requests

    return requests.Session()


class HttpSource(RemoteSource):
    """A folder on a web server that supports requests of byte ranges (RFC 9110, section 14)."""

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        import requests

        headers = {"Accept-Encoding": "identity"}
        if size is not None:
            headers["Range"] = f"bytes={offset}-{offset + size - 1}"
        try:
            with make_web_client(os.getpid()).get(
                f"{self.url}/{name}{self.query}", headers=headers, timeout=self.timeout, stream=True
            ) as reply:
                # Return no bytes for status 416, which means that the file ends before the offset.
                if reply.status_code == 416:
                    return b""
                check_reply(reply, size is not None)

                # Try to read one byte more than requested: if there is one, the server ignored the
                # range.
                amount = None if size is None else size + 1
                content = reply.raw.read(amount, decode_content=True)
                if amount == len(content):
                    raise OSError(
                        f"the server sends more than the {size} bytes that were asked for"
                    )
        except (requests.ConnectionError, requests.Timeout, HTTPError) as error:
            # Report urllib3's reason, because requests only says "Max retries exceeded".
            reason = getattr(error.args and error.args[0], "reason", error)
            raise TransientError(describe_error(reason)) from error
        except (requests.RequestException, ValueError) as error:
            # Do not retry after a bad URL or redirect, because the retry also fails.
            raise OSError(describe_error(error)) from error
        if size is not None:
            check_part(content, reply.headers.get("Content-Range"), offset, size)
        return content


def check_reply(reply: Any, in_part: bool) -> None:
    """Raises an OSError if a web server's reply is not the file, or, with `in_part`, not a part of
    the file."""
    status = reply.status_code
    headers = reply.headers
    if status in (408, 429) or status >= 500:
        pause = headers.get("Retry-After")
        asks = (
            f" and asks for a pause of {pause}; a reader waits {LONGEST_PAUSE_SECONDS:g} s at most"
        )
        raise TransientError(f"the server answers {status}{asks if pause else ''}", reply.raw)

    # Raise an OSError that is no TransientError for the following faults, so that the source does
    # not retry: a retry cannot succeed.
    if status in (404, 410):
        raise FileNotFoundError(f"the server answers {status}")
    if status not in (200, 206):
        raise OSError(f"the server answers {status}")
    if headers.get("Content-Type", "").lower().startswith("text/html"):
        raise OSError(
            "the server answers with a web page instead of the file, such as one to log in"
        )
    if status == 200 and in_part:
        raise OSError("the server does not send parts of files; set data.cache=<folder>")
    encoding = headers.get("Content-Encoding", "identity").lower()
    if in_part and encoding != "identity":
        raise OSError(
            f"the server sends parts of files compressed ({encoding}); set data.cache=<folder>"
        )


def check_part(content: bytes, content_range: str | None, offset: int, size: int) -> None:
    """Raises an OSError if `content`, whose Content-Range header is `content_range`, is not the
    requested part of the file: `size` bytes from `offset` on."""
    end = offset + len(content)
    expected = f"bytes {offset}-{end - 1}/{end}"
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range or expected)

    # Accept fewer bytes than requested only at the end of the file.
    if (
        not match
        or (int(match[1]), int(match[2]) + 1) != (offset, end)
        or (len(content) < size and match[3] != str(end))
    ):
        raise OSError(
            f"the server sends {len(content)} bytes as {content_range!r}, and {size} bytes from "
            f"{offset} were asked for"
        )


class FsspecSource(RemoteSource):
    """A folder in any store that fsspec implements, such as s3://, gs:// and hf://. The store uses
    its own timeouts, not `timeout`."""

    def read_once(self, name: str, offset: int, size: int | None) -> bytes:
        import fsspec

        end = None if size is None else offset + size
        try:
            store, folder = fsspec.core.url_to_fs(self.url)
            return store.cat_file(f"{folder}/{name}", start=offset or None, end=end)
        except FileNotFoundError:
            raise
        except (ImportError, ValueError) as error:
            # Do not retry if fsspec does not know the store, or if the store's package is missing.
            raise OSError(hide_secrets(shorten_error(error))) from error
        except Exception as error:
            # Retry after any other error, because each store raises its own types of errors.
            raise TransientError(describe_error(error)) from error


class CachedSource(Source):
    """Keeps copies of the whole shards of `source` in `folder`/<hash of the URL>, and reads from
    these copies. Reads other files from `source` each time.

    The hash does not depend on the query of the URL, so the copies stay valid if a token in the
    query is renewed. Threads and processes may share a cache: each copies a shard to its own
    temporary file and renames this file when it is complete.
    """

    def __init__(self, source: RemoteSource, folder: Path) -> None:
        self.source = source
        self.folder = folder / hashlib.sha256(source.given_url.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return str(self.source)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        if not name.endswith(".tar"):
            return self.source.read(name, offset, size)
        file = self.folder / name
        while True:
            with FETCH_LOCKS[file]:
                if not file.is_file():
                    self.fetch(file)
            try:
                return LocalSource(self.folder).read(name, offset, size)
            except FileNotFoundError:
                # Another process deleted the copy because it was damaged: fetch the shard again.
                continue

    def fetch(self, file: Path) -> None:
        """Copies a file from the source into the cache, by renaming a complete copy: a reader never
        sees a part of the file."""
        content = self.source.read(file.name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                copy = Path(folder) / file.name
                copy.write_bytes(content)
                copy.replace(file)
        except OSError as error:
            raise UserError(
                f"data.cache: {self.folder} cannot take {file.name}, "
                f"{len(content) / 2**20:.0f} MiB ({error.strerror}); free some space, choose "
                "another folder, or leave data.cache out."
            ) from error

    def forget(self, name: str) -> bool:
        (self.folder / name).unlink(missing_ok=True)
        return True
