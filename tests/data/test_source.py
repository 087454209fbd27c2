"""Latent sets over the network: transient failures are tried again, other failures are named, and
caches hold whole shards. A real server answers on the loopback device."""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from data import source
from data.blocks import BlockReader
from data.manifest import read_manifest
from data.source import open_source
from tests.harness.batches import assert_same, join, streamed, take
from tests.harness.refusals import expect_refusal
from tests.harness.server import Server, reply
from tests.harness.sets import save_random_set

FIRST = "train-00000.tar"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three training shards of 20, in blocks of four, and a held-out one. Read only."""
    return save_random_set(tmp_path_factory.mktemp("set"), 20, 20, 20, held_out=8)


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(source, "FIRST_PAUSE_SECONDS", 0.001)
    with Server(folder) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.released.set()
        running.shutdown()


def read_part(server, **settings):
    return open_source(server.url, **settings).read(FIRST, 10, 10)


def fail_shards(verdict):
    """Makes a server that sends only the manifest and answers other requests with `verdict`."""
    return lambda number, path: None if "manifest" in path else verdict


def find_copies(cache):
    return [file for file in cache.rglob("*") if file.is_file()]


@pytest.mark.parametrize("failure", [500, 503, 429, "cut"])
def test_what_fails_for_a_moment_is_tried_again(folder, server, failure):
    attempts = Counter()

    def fail_twice(number, request):
        attempts[request] += 1
        return failure if attempts[request] <= 2 else None

    server.script = fail_twice
    local = streamed(folder)
    remote = streamed(server.url, num_workers=2)
    assert_same(take(remote, 6), take(local, 6))
    assert_same(join(remote.held_out(3)), join(local.held_out(3)))


@pytest.mark.fault("a server of latents that hangs", "given up on within its timeout")
def test_a_server_that_hangs_is_given_up_on(server):
    server.script = fail_shards("hang")
    loader = streamed(server.url, timeout=0.5, retries=1)
    with expect_refusal(r"cannot be read: ReadTimeout.*\(2 attempts\)"):
        next(loader)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (500, r"tar \(samples .* cannot be read: the server answers 500 \(3 attempts\)"),
        (404, r"tar \(samples .* is missing \(the server answers 404\)"),
    ],
)
def test_what_fails_for_good_is_named(server, status, sentence):
    server.script = fail_shards(status)
    with expect_refusal(sentence):
        next(streamed(server.url, retries=2))


RANGE = "bytes 10-19/100"
"""Content-Range of the part that `read_part` asks for."""


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (reply(302, Location=f"/{FIRST}"), r"TooManyRedirects Exceeded 30 redirects$"),
        (reply(302, Location="ftp://elsewhere/x"), r"InvalidSchema [^(]*$"),
        (reply(206, b"x" * 11), r"the server sends more than the 10 bytes that were asked for"),
        (
            reply(206, b"x" * 9, Content_Range="bytes 10-18/100"),
            r"sends 9 bytes as 'bytes 10-18/100', and 10 bytes from 10 were",
        ),
        (
            reply(206, b"x" * 9, Content_Range=RANGE),
            r"sends 9 bytes as 'bytes 10-19/100', and 10 bytes from 10 were",
        ),
        (reply(206, b"x" * 10, Content_Range="bytes 0-9/100"), r"sends 10 bytes as 'bytes 0-9/1"),
        (reply(206, b"x" * 10, Content_Range="pages 1-2"), r"sends 10 bytes as 'pages 1-2'"),
        (
            reply(206, b"x" * 9, Content_Range=RANGE, Content_Encoding="gzip"),
            r"sends parts of files compressed \(gzip\)",
        ),
        (
            reply(200, b"<html>", Content_Type="text/html"),
            r"a web page instead of the file, such as one to log in",
        ),
        (reply(304), r"the server answers 304"),
    ],
)
def test_a_server_that_answers_something_else_ends_in_one_sentence(server, answer, sentence):
    server.script = fail_shards(answer)
    with pytest.raises(OSError, match=sentence) as error:
        read_part(server, retries=1)
    assert "\n" not in str(error.value)


def test_the_end_of_a_file_may_be_short(server):
    server.script = fail_shards(reply(206, b"xxxx", Content_Range="bytes 10-13/14"))
    assert read_part(server) == b"xxxx"


def test_an_endless_reply_does_not_fill_memory(server):
    pieces = []

    def send_forever(handler):
        handler.send_response(206)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while len(pieces) < 2000:
                pieces.append(handler.wfile.write(bytes(2**16)))

    server.script = fail_shards(send_forever)
    with pytest.raises(OSError, match="more than the 10 bytes"):
        read_part(server)
    assert len(pieces) < 1000


@pytest.fixture
def pauses(monkeypatch):
    """Seconds of the pauses that a reader makes; none is waited for."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    ("header", "expected"), [("7", [7.0]), ("soon", []), ("3600", [source.LONGEST_PAUSE_SECONDS])]
)
def test_retry_after_is_waited_for(server, pauses, header, expected):
    answer = reply(503, Retry_After=header)
    server.script = lambda number, path: answer if number == 1 else None
    assert read_part(server)
    assert pauses == expected


def test_pauses_grow_and_attempts_end(server, pauses):
    server.script = fail_shards(500)
    with pytest.raises(OSError, match=r"answers 500 \(5 attempts\)"):
        read_part(server, retries=4)
    assert pauses == [factor * source.FIRST_PAUSE_SECONDS for factor in (2, 4, 8)]
    server.script = fail_shards(reply(429, Retry_After="3600"))
    with pytest.raises(OSError, match=r"asks for a pause of 3600; .* waits 30 s at most"):
        read_part(server, retries=1)


def test_a_signed_url_is_read_and_never_shown(folder, server, tmp_path, capsys, caplog):
    """The name of a file goes before the query, the cache outlives the token, and no text holds a
    secret."""
    caplog.set_level("INFO")
    signed = f"{server.url.replace('://', '://me:pass@')}/?token=abc&expires=1"
    cache = str(tmp_path / "cache")
    assert_same(next(streamed(signed, cache=cache)), next(streamed(folder)))
    assert {path.partition("?")[2] for path in server.requests} == {"token=abc&expires=1"}
    take(streamed(signed.replace("abc", "new"), cache=cache), 9)
    assert sum(FIRST in path for path in server.requests) == 1

    server.script = fail_shards(403)
    with expect_refusal(rf"{server.url}/train-0000\d.tar .* answers 403") as error:
        next(streamed(signed))
    texts = [str(error.value), str(open_source(signed)), capsys.readouterr().out, caplog.text]
    for url in (f"{signed}#part", signed.replace("http", "s3"), f"{server.url}:x?token=abc"):
        with pytest.raises((ValueError, OSError)) as error:
            open_source(url).read("manifest.json")
        texts.append(str(error.value))
    for text in texts:
        assert "abc" not in text
        assert "pass" not in text


def test_the_cache_of_a_plain_url_is_where_it_was(server, tmp_path):
    url = f"{server.url}/"
    open_source(url, cache=str(tmp_path)).read(FIRST, 0, 4)
    digest = hashlib.sha256(url.encode()).hexdigest()
    assert find_copies(tmp_path) == [tmp_path / digest[:16] / FIRST]


def test_an_address_of_numbers_is_no_chain():
    assert str(open_source("http://[::1]:8000/set")) == "http://[::1]:8000/set"


def test_a_server_without_parts_needs_a_cache(folder, server, tmp_path):
    server.ranges = False
    with expect_refusal(r"does not send parts of files; set data.cache=<folder>"):
        next(streamed(server.url))
    assert_same(take(streamed(server.url, cache=str(tmp_path)), 9), take(streamed(folder), 9))
    assert len(find_copies(tmp_path)) == 3


def open_reader(server, cache, on_corrupt="error"):
    opened = open_source(server.url, cache=str(cache))
    return BlockReader(opened, read_manifest(opened), "train", on_corrupt)


def test_a_cached_shard_is_not_fetched_again_and_a_damaged_one_is(server, tmp_path):
    reader = open_reader(server, tmp_path)
    reader.read(0)
    reader.read(1)
    assert server.requests.count(f"/{FIRST}") == 1
    (copy,) = find_copies(tmp_path)
    copy.write_bytes(bytes(copy.stat().st_size))
    assert torch.equal(reader.read(2)["ids"], torch.arange(8, 12))
    assert server.requests.count(f"/{FIRST}") == 2


def test_many_threads_and_processes_share_a_cache(folder, server, tmp_path):
    """A process fetches each shard once, and no reader meets a half-written copy."""
    reader = open_reader(server, tmp_path / "cache")
    server.script = lambda number, path: time.sleep(0.05)
    with ThreadPoolExecutor(8) as threads:
        blocks = list(threads.map(reader.read, [*range(15)] * 4))
    for i, block in enumerate(blocks):
        assert torch.equal(block["ids"], blocks[i % 15]["ids"])
    assert sorted(server.requests) == ["/manifest.json", *(f"/train-0000{i}.tar" for i in range(3))]
    assert {file.suffix for file in find_copies(tmp_path)} == {".tar"}
    remote = streamed(server.url, num_workers=2, cache=str(tmp_path / "other"))
    assert_same(take(remote, 9), take(streamed(folder), 9))


def test_a_full_cache_says_so(server, tmp_path, monkeypatch):
    reader = open_reader(server, tmp_path, "skip")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with expect_refusal(rf"data.cache: .* cannot take {FIRST}.*No space left.*free some space"):
        reader.read(0)
    assert find_copies(tmp_path) == []


def test_an_outage_loses_nothing_for_good(server):
    """Under on_corrupt=skip a reader asks for a block that it could not read again in the next
    epoch."""
    settings = {"batch_size": 7, "on_corrupt": "skip", "retries": 0}
    block = read_manifest(server.folder).shards[1].blocks[2]
    part = f"00001.tar bytes={block.offset}-"
    outage = True
    server.script = lambda number, request: 503 if outage and part in request else None
    loader = streamed(server.url, **settings)
    first = take(loader, 9).ids[:60]
    outage = False

    # readers are a window ahead of the batches, so the next epoch may still have a gap
    later = take(loader, 27).ids[57:117]
    assert len(first.unique()) < 60
    assert torch.equal(later.sort().values, torch.arange(60))

    # a store that answers nothing is no damaged block
    server.script = lambda number, path: 503
    with expect_refusal("the server answers 503"):
        next(streamed(server.url, **settings))


def test_fsspec_opens_other_stores(folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/latents/{file.name}", file.read_bytes())
    assert_same(take(streamed("memory://latents"), 9), take(streamed(folder), 9))
    with expect_refusal("nosuch://x/manifest.json cannot be read: Protocol not known: nosuch"):
        streamed("nosuch://x")
