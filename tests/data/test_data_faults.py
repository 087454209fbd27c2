"""What can be wrong with a latent set, each refused in one sentence or skipped and counted; and
servers that fail."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import multiprocessing
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from data import source
from data.blocks import BlockReader
from data.digits import DigitLatents
from data.manifest import read_manifest
from data.resident import ResidentLatents
from data.source import open_source
from data.streamed import StreamDataset, StreamedLatents
from encoding.images import DecodedImages, decoding_loader
from tests.data.test_loaders import assert_same, joined
from tests.harness.sets import random_samples, save_latent_set, write_shard
from tests.harness.words import CPU
from training.assemble import assemble
from training.config.build import build
from training.config.compose import compose, refuse_no_weights

Run = Callable[..., dict[str, Any]]
KINDS = ["resident", "chunks", "webdataset", "webdataset, 2 workers"]


def load(kind: str, path: str | Path, **changes: object):
    settings = {"batch_size": 7, "seed": 0, "device": CPU} | changes
    if kind.startswith("webdataset"):
        return StreamedLatents(
            path=str(path),
            streams=4,
            window=8,
            num_workers=2 if "workers" in kind else 0,
            **settings,
        )
    room = 16 * 240 / 2**30 if kind == "chunks" else None
    return ResidentLatents(path=str(path), device_memory_gib=room, **settings)


def use(kind: str, folder: Path) -> None:
    """More than an epoch."""
    list(islice(load(kind, folder), 10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three training shards of 20, in blocks of four, and a held-out one."""
    parts = [("train", random_samples(20, seed)) for seed in range(3)] + [
        ("held_out", random_samples(8, 9))
    ]
    save_latent_set(tmp_path / "set", parts)
    return tmp_path / "set"


def block_bytes(folder: Path, shard: int, block: int) -> tuple[Path, int, int]:
    described = read_manifest(folder).shards[shard]
    return folder / described.file, described.blocks[block].offset, described.blocks[block].size


def truncated(folder: Path) -> None:
    file, offset, size = block_bytes(folder, 1, 2)
    file.write_bytes(file.read_bytes()[: offset + size // 2])


def flipped_byte(folder: Path) -> None:
    file, offset, size = block_bytes(folder, 1, 2)
    content = bytearray(file.read_bytes())
    content[offset + size - 3] ^= 1
    file.write_bytes(content)


def zeroed_hole(folder: Path) -> None:
    file, offset, _ = block_bytes(folder, 1, 2)
    content = bytearray(file.read_bytes())
    content[offset + 100 : offset + 600] = bytes(500)
    file.write_bytes(content)


def missing(folder: Path) -> None:
    block_bytes(folder, 1, 2)[0].unlink()


def not_finite(folder: Path) -> None:
    """Written by somebody's own tool: the hash is right, the content is not."""
    samples = [random_samples(20, seed) for seed in range(3)]
    samples[1]["latents"][9, 0, 0, 0] = float("nan")
    save_latent_set(folder, [*(("train", s) for s in samples), ("held_out", random_samples(4, 9))])


DAMAGES: dict[Callable[[Path], None], tuple[str, int]] = {
    truncated: (" of train) ends early", 12),
    flipped_byte: ("(samples 28–31 of train) is damaged: its sha256", 4),
    zeroed_hole: ("(samples 28–31 of train) is damaged: its sha256", 4),
    missing: (" of train) is missing", 20),
    not_finite: ("(samples 28–31 of train) holds latents that are not finite", 4),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("damaged or missing shards", "one sentence that names shard and samples")
def test_damage_ends_in_one_sentence(folder: Path, kind: str, damage: Callable[[Path], None]):
    damage(folder)
    with pytest.raises(ValueError, match=r"train-00001.tar") as caught:
        use(kind, folder)
    message = str(caught.value)
    assert "\n" not in message
    assert DAMAGES[damage][0] in message
    assert "run precompute_latents.py again to rebuild it, or set data.on_corrupt=skip" in message


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_or_is_skipped_and_counted(folder: Path, kind: str, damage: Callable[[Path], None], capsys):
    """Others stand in: the stream stays as long as it was, and as exact."""
    damage(folder)
    loader = load(kind, folder, on_corrupt="skip")
    again = load(kind, folder, on_corrupt="skip")
    batches = [next(loader) for _ in range(18)]  # two epochs of 60
    epoch = torch.cat([batch.ids for batch in batches])[:60]
    lost = 20 if damage is missing else 12 if damage is truncated else 4
    assert len(epoch.unique()) == 60 - lost
    assert all(batch.latents.isfinite().all() for batch in batches)
    again.load_state_dict(again.state_dict() | {"samples_seen": 35})
    assert_same(next(again), batches[5])
    said = capsys.readouterr().out
    assert "train-00001.tar" in said
    assert f"({lost} so far)" in said


@pytest.mark.parametrize("data", ["data=resident", "data=webdataset"])
def test_a_run_on_damaged_data_says_so_at_its_end(
    folder: Path, run: Run, tmp_path: Path, data: str, capsys
):
    """In its metrics and its summary; after a resume on a mended set too, for its weights have seen
    the others."""
    good = {file: file.read_bytes() for file in folder.glob("*.tar")}
    flipped_byte(folder)
    held_out, offset, _ = block_bytes(folder, 3, 1)
    held_out.write_bytes(held_out.read_bytes()[: offset + 100])
    words = [
        data,
        f"data.path={folder}",
        "data.on_corrupt=skip",
        "save_every=1",
        "eval_every=4",
        "batch_size=10",
    ]
    words += ["log_every=100"]
    words += ["data.num_workers=0"] if data == "data=webdataset" else []
    summary = run(*words, "total_samples=80")
    lost = [
        "train-00001.tar (samples 28–31 of train)",
        "held_out-00003.tar (samples 4–7 of held_out)",
    ]
    assert summary["skipped_data"] == dict.fromkeys(lost, 4)
    assert (
        f"others stood in for 8 samples of 2 damaged blocks: {', '.join(lost)}"
        in capsys.readouterr().out
    )
    for file, content in good.items():
        file.write_bytes(content)
    again = run(*words, "total_samples=160")
    assert again["skipped_data"] == summary["skipped_data"]
    assert again["steps"] == 16
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["skipped_data"] == 8


def test_a_loader_that_fails_leaves_no_worker_behind(folder: Path, monkeypatch: pytest.MonkeyPatch):
    workers = []
    start = BaseProcess.start

    def noted(worker: BaseProcess) -> None:
        workers.append(worker)
        start(worker)

    monkeypatch.setattr(BaseProcess, "start", noted)
    flipped_byte(folder)
    loader = load("webdataset, 2 workers", folder)
    with pytest.raises(ValueError, match="is damaged"):
        list(islice(loader, 10))
    # PyTorch terminates one that gets no word to end
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_nothing_left_to_stand_in_is_an_error(folder: Path):
    for file in folder.glob("train*.tar"):
        file.unlink()
    with pytest.raises(ValueError, match="not one block can be read"):
        next(load("webdataset", folder, on_corrupt="skip"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_of_another_encoder_or_scale_is_refused(folder: Path, kind: str):
    for key, value in (
        ("encoder", "someone/other-vae"),
        ("latent_scale", 0.18215),
        ("normalisation", "whiten"),
    ):
        with pytest.raises(ValueError, match=f"data.{key}={value}"):
            load(kind, folder, **{key: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"streams": 0}, "data.streams=0 must be at least 1"),
        ({"window": 0}, "data.window=0 must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
        ({"timeout": 0.0}, "data.timeout=0.0 must be above 0"),
        ({"retries": -1}, "data.retries=-1 must be at least 0"),
        ({"prefetch_factor": 0}, "data.prefetch_factor=0 must be at least 1"),
        ({"on_corrupt": "ignore"}, "data.on_corrupt=ignore must be 'error' or 'skip'"),
        ({"path": None}, "data=webdataset needs data.path"),
        ({"path": "pipe:curl x"}, "pipes and chained URLs are not opened"),
        ({"path": "simplecache::s3://x"}, "pipes and chained URLs are not opened"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder: Path, changes: dict, sentence: str):
    node = compose(["data=webdataset"]).cfg.data | {"path": str(folder)} | changes
    with pytest.raises(ValueError, match=sentence):
        build(node, "data", batch_size=2, seed=0, device=CPU)


def test_a_latent_set_is_no_weights(folder: Path):
    """It has a manifest.json, as a checkpoint has."""
    with pytest.raises(
        ValueError, match=r"init_from=.* has no checkpoints and no state.json .*name a run that has"
    ):
        refuse_no_weights("init_from", str(folder))


@pytest.mark.parametrize("classes", [[0, 0], [10], []])
def test_classes_that_there_are_not_are_refused(classes: list[int]):
    with pytest.raises(ValueError, match=r"data.classes=.* must be digits from 0 to 9, each once"):
        DigitLatents(classes=classes, batch_size=2, seed=0, device=CPU)


@pytest.mark.fault("a worker of the loader killed", "one sentence, within its timeout")
def test_a_killed_worker_is_named(folder: Path):
    loader = load("webdataset, 2 workers", folder)
    next(loader)
    for worker in multiprocessing.active_children():
        worker.kill()
    with pytest.raises(
        ValueError, match=r"a reader of data=webdataset died .*start the same command again"
    ):
        list(islice(loader, 100))


@pytest.mark.fault(
    "/dev/shm too small for the batches of workers", "one sentence at the start, with --shm-size"
)
def test_small_shared_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loader = load("webdataset, 2 workers", folder)
    small = shutil.disk_usage("/dev/shm")._replace(free=192 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    with pytest.raises(
        ValueError, match=r"need 1\.0 MiB of /dev/shm, which has 0\.2 MiB free; .*--shm-size=1g"
    ):
        next(loader)
    next(load("webdataset", folder))  # without workers none is needed
    images = DecodedImages([], 256)
    batches = [list(range(16))]
    with pytest.raises(
        ValueError, match=r"processes that decode images need 19\.0 MiB of /dev/shm, which has 0\.2"
    ):
        decoding_loader(images, batches, workers=2)
    decoding_loader(images, batches, workers=0)


@pytest.mark.fault(
    "readers that give no batch any more", "the run ends within runtime.parallel.timeout_minutes"
)
def test_readers_that_stop_are_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker that finds /dev/shm full drops its batch and lives on."""
    released = threading.Event()
    monkeypatch.setattr(StreamDataset, "batch", lambda *arguments: released.wait())
    loader = load("webdataset", folder)
    loader.patience = 0.1
    with pytest.raises(ValueError, match=r"gave no batch for 0\.00\d+ minutes .*timeout_minutes"):
        next(loader)
    released.set()


def test_the_patience_of_a_loader_is_that_of_the_run():
    cfg = compose(["runtime=eager", "runtime.parallel.timeout_minutes=0.5"]).cfg
    assert assemble(cfg, CPU).loader.patience == 30.0


# Over the network


class Server(http.server.ThreadingHTTPServer):
    """Files of a folder in parts. `script` decides about each request: a status to answer, "hang",
    "cut", None, or a function that answers itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.script: Callable[[int, str], object] = lambda number, path: None
        self.requests: list[str] = []
        self.ranges = True
        self.released = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves early is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        verdict = self.server.script(
            len(self.server.requests), f"{self.path} {self.headers.get('Range', '')}".strip()
        )
        if callable(verdict):
            verdict(self)
            return
        file = self.server.folder / self.path.partition("?")[0].lstrip("/")
        if verdict == "hang":
            self.server.released.wait(20.0)
            return
        if isinstance(verdict, int) or not file.is_file():
            self.send_response(verdict if isinstance(verdict, int) else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        status = 200
        if self.server.ranges and (asked := self.headers.get("Range")):
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
            status = 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if verdict == "cut" else content)
        self.close_connection = verdict == "cut"

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(source, "FIRST_PAUSE", 0.001)
    with Server(folder) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.released.set()
        running.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_url_gives_the_stream_of_the_folder(folder: Path, server: Server, workers: int):
    local, remote = (
        StreamedLatents(
            path=path, streams=4, window=8, num_workers=n, batch_size=7, seed=0, device=CPU
        )
        for path, n in ((str(folder), 0), (server.url, workers))
    )
    for _ in range(12):
        assert_same(next(local), next(remote))
    assert_same(joined(list(local.held_out(3))), joined(list(remote.held_out(3))))


def test_resident_reads_a_url_too(folder: Path, server: Server):
    assert_same(next(load("resident", folder)), next(load("resident", server.url)))


@pytest.mark.parametrize("failure", [500, 503, 429, "cut"])
def test_what_fails_for_a_moment_is_tried_again(folder: Path, server: Server, failure: object):
    tried: Counter[str] = Counter()

    def twice(number: int, what: str) -> object:
        tried[what] += 1
        return failure if tried[what] <= 2 else None

    server.script = twice
    loader = load("webdataset", server.url)
    expected = load("webdataset", folder)
    for _ in range(9):
        assert_same(next(loader), next(expected))


@pytest.mark.fault("a server of latents that hangs", "given up on within its timeout")
def test_a_server_that_hangs_is_given_up_on(server: Server):
    server.script = lambda number, path: None if path.endswith(".json") else "hang"
    loader = load("webdataset", server.url, timeout=1.0, retries=1)
    with pytest.raises(
        ValueError,
        match=r"train-0000\d.tar \(samples .* cannot be read: ReadTimeout.*\(2 attempts\)",
    ):
        next(loader)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (500, r"tar \(samples .* cannot be read: the server answers 500 \(3 attempts\)"),
        (404, r"tar \(samples .* is missing \(the server answers 404\)"),
        (403, r"tar \(samples .* cannot be read: the server answers 403;"),
    ],
)
def test_what_fails_for_good_is_named(server: Server, status: int, sentence: str):
    server.script = lambda number, path: None if path.endswith(".json") else status
    loader = load("webdataset", server.url, retries=2)
    with pytest.raises(ValueError, match=sentence):
        next(loader)


def answer(status: int, content: bytes = b"", **headers: str) -> Callable[[Handler], None]:
    """A reply with other headers than an honest server's; `_` in their names stands for `-`."""

    def reply(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return reply


HONEST = "bytes 10-19/100"
"""Content-Range of the part that the next test asks for."""


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (answer(302, Location="/train-00000.tar"), r"TooManyRedirects Exceeded 30 redirects$"),
        (answer(302, Location="ftp://elsewhere/x"), r"InvalidSchema [^(]*$"),
        (answer(302, Location="http://h:x/"), r"InvalidURL [^(]*'x'$"),
        (answer(206, b"x" * 11), r"the server sends more than the 10 bytes that were asked for"),
        (
            answer(206, b"x" * 9, Content_Range="bytes 10-18/100"),
            r"sends 9 bytes as 'bytes 10-18/100', and 10 bytes from 10 were",
        ),
        (
            answer(206, b"x" * 9, Content_Range=HONEST),
            r"sends 9 bytes as 'bytes 10-19/100', and 10 bytes from 10 were",
        ),
        (
            answer(206, b"x" * 10, Content_Range="bytes 0-9/100"),
            r"sends 10 bytes as 'bytes 0-9/100', and 10 bytes from",
        ),
        (answer(206, b"x" * 10, Content_Range="pages 1-2"), r"sends 10 bytes as 'pages 1-2'"),
        (
            answer(206, b"x" * 9, Content_Range=HONEST, Content_Encoding="gzip"),
            r"sends parts of files compressed \(gzip\)",
        ),
        (
            answer(200, b"<html>", Content_Type="text/html"),
            r"a web page instead of the file, such as one to log in",
        ),
        (answer(401), r"the server answers 401"),
        (answer(304), r"the server answers 304"),
    ],
)
def test_a_server_that_answers_something_else_ends_in_one_sentence(
    server: Server, reply: Callable, sentence: str
):
    server.script = lambda number, path: reply
    with pytest.raises(OSError, match=sentence) as caught:
        open_source(server.url, retries=1).read("train-00000.tar", 10, 10)
    assert "\n" not in str(caught.value)


def test_the_end_of_a_file_may_be_short(server: Server):
    server.script = lambda number, path: answer(206, b"x" * 4, Content_Range="bytes 10-13/14")
    assert open_source(server.url).read("train-00000.tar", 10, 10) == b"xxxx"


def test_a_redirect_loop_and_a_web_page_name_the_set(server: Server):
    for reply, sentence in (
        (answer(302, Location="/a"), "TooManyRedirects"),
        (answer(200, Content_Type="text/html"), "web"),
    ):
        server.script = lambda number, path, reply=reply: reply
        with pytest.raises(
            ValueError, match=rf"{server.url}/manifest.json cannot be read: .*{sentence}"
        ):
            load("webdataset", server.url)


def test_an_endless_reply_does_not_fill_memory(server: Server):
    sent = []

    def endless(handler: Handler) -> None:
        handler.send_response(206)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while len(sent) < 2000:
                sent.append(handler.wfile.write(bytes(2**16)))

    server.script = lambda number, path: endless
    with pytest.raises(OSError, match="more than the 10 bytes"):
        open_source(server.url).read("train-00000.tar", 10, 10)
    assert len(sent) < 1000


def paused(server: Server, monkeypatch: pytest.MonkeyPatch, told: str) -> list[float]:
    """The pauses of a reader whose server is busy once and says `told`."""
    server.script = lambda number, path: answer(503, Retry_After=told) if number % 2 else None
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert open_source(server.url).read("train-00000.tar", 0, 4)
    return pauses


def test_retry_after_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch):
    assert paused(server, monkeypatch, "7") == [7.0]
    (pause,) = paused(server, monkeypatch, formatdate(time.time() + 20.0, usegmt=True))
    assert 15.0 < pause <= 20.0
    assert paused(server, monkeypatch, formatdate(time.time() - 99.0, usegmt=True)) == []
    assert paused(server, monkeypatch, "soon") == []
    assert paused(server, monkeypatch, "3600") == [source.LONGEST_PAUSE]
    server.script = lambda number, path: 500
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(OSError, match=r"answers 500 \(5 attempts\)"):
        open_source(server.url, retries=4).read("train-00000.tar", 0, 4)
    assert pauses == [factor * source.FIRST_PAUSE for factor in (2, 4, 8)]
    server.script = lambda number, path: answer(429, Retry_After="3600")
    with pytest.raises(
        OSError,
        match=r"answers 429 and asks for a pause of 3600; .* waits 30 s at most \(2 attempts\)",
    ):
        open_source(server.url, retries=1).read("train-00000.tar", 0, 4)


def test_a_signed_url_is_read_and_never_shown(
    folder: Path, server: Server, tmp_path: Path, capsys, caplog
):
    """The name of a file goes before the query, the cache outlives the token, and no text holds a
    secret."""
    caplog.set_level("INFO")
    signed = f"{server.url.replace('://', '://me:pass@')}/?token=abc&expires=1"
    cache = str(tmp_path / "cache")
    assert_same(next(load("webdataset", signed, cache=cache)), next(load("webdataset", folder)))
    assert {path.partition("?")[2] for path in server.requests} == {"token=abc&expires=1"}
    asked = server.requests.count("/train-00000.tar?token=abc&expires=1")
    list(islice(load("webdataset", signed.replace("abc", "new"), cache=cache), 9))
    assert (asked, sum("train-00000.tar" in path for path in server.requests)) == (1, 1)
    server.script = lambda number, path: None if "manifest" in path else 403
    with pytest.raises(
        ValueError, match=rf"{server.url}/train-0000\d.tar .* the server answers 403"
    ) as caught:
        next(load("webdataset", signed))
    said = [str(caught.value), str(open_source(signed)), capsys.readouterr().out, caplog.text]
    for bad in (
        f"{signed}#part",
        signed.replace("http", "s3"),
        signed.replace("http", "a::http"),
        f"{server.url}:x?token=abc",
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            open_source(bad).read("manifest.json")
        said.append(str(caught.value))
    assert not [text for text in said if "abc" in text or "pass" in text]


def test_the_cache_of_a_plain_url_is_where_it_was(server: Server, tmp_path: Path):
    source = open_source(f"{server.url}/", cache=str(tmp_path))
    source.read("train-00000.tar", 0, 4)
    assert (
        tmp_path / hashlib.sha256(f"{server.url}/".encode()).hexdigest()[:16] / "train-00000.tar"
    ).is_file()


@pytest.mark.parametrize("end", ["#part", "?a=1#part"])
def test_a_fragment_is_refused(end: str):
    with pytest.raises(
        ValueError, match=r"^data.path=http://host/set has a fragment behind a #; leave it out"
    ):
        open_source(f"http://host/set{end}")


def test_an_address_of_numbers_is_no_chain():
    assert str(open_source("http://[::1]:8000/set")) == "http://[::1]:8000/set"


def test_a_server_without_parts_needs_a_cache(folder: Path, server: Server, tmp_path: Path):
    server.ranges = False
    with pytest.raises(ValueError, match=r"does not send parts of files; set data.cache=<folder>"):
        next(load("webdataset", server.url))
    cached = load("webdataset", server.url, cache=str(tmp_path / "cache"))
    expected = load("webdataset", folder)
    for _ in range(9):
        assert_same(next(cached), next(expected))
    assert len(list((tmp_path / "cache").rglob("*.tar"))) == 3


def test_a_cached_shard_is_not_fetched_again_and_a_damaged_one_is(
    folder: Path, server: Server, tmp_path: Path
):
    opened = open_source(server.url, cache=str(tmp_path / "cache"))
    manifest = read_manifest(opened)
    reader = BlockReader(opened, manifest, "train")
    reader.read(0)
    asked = len(server.requests)
    reader.read(1)
    assert len(server.requests) == asked
    (copy,) = (tmp_path / "cache").rglob("*.tar")
    copy.write_bytes(bytes(copy.stat().st_size))
    assert torch.equal(reader.read(2)["ids"], torch.arange(8, 12))
    assert len(server.requests) == asked + 1


def test_many_threads_and_processes_share_a_cache(folder: Path, server: Server, tmp_path: Path):
    """Each shard is fetched once in a process, and nobody reads a half-written copy."""
    source = open_source(server.url, cache=str(tmp_path / "cache"))
    reader = BlockReader(source, read_manifest(source), "train")
    server.script = lambda number, path: time.sleep(0.05)
    with ThreadPoolExecutor(8) as threads:
        blocks = list(threads.map(reader.read, [*range(15)] * 4))
    assert all(torch.equal(block["ids"], blocks[i % 15]["ids"]) for i, block in enumerate(blocks))
    assert sorted(server.requests) == ["/manifest.json", *(f"/train-0000{i}.tar" for i in range(3))]
    assert not [
        file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.suffix != ".tar"
    ]
    again = load("webdataset, 2 workers", server.url, cache=str(tmp_path / "other"))
    expected = load("webdataset", folder)
    for _ in range(9):
        assert_same(next(again), next(expected))


def test_a_full_cache_says_so(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = open_source(server.url, cache=str(tmp_path / "cache"))
    reader = BlockReader(source, read_manifest(source), "train", "skip")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(
        ValueError,
        match=r"data.cache: .* cannot take train-00000.tar.*No space left.*free some space",
    ):
        reader.read(0)
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_an_outage_loses_nothing_for_good(server: Server):
    """Under on_corrupt=skip a block that could not be read is asked for again in the next epoch."""
    block = read_manifest(server.folder).shards[1].blocks[2]
    gone = {"on": True}
    server.script = lambda number, what: (
        503 if gone["on"] and f"00001.tar bytes={block.offset}-" in what else None
    )
    loader = load("webdataset", server.url, on_corrupt="skip", retries=0)
    first = torch.cat([next(loader).ids for _ in range(9)])[:60]
    gone["on"] = False
    # what was read ahead in the outage is over
    later = torch.cat([next(loader).ids for _ in range(27)])[57:117]
    assert len(first.unique()) < 60
    assert torch.equal(later.sort().values, torch.arange(60))
    server.script = lambda number, path: 503
    # a store that is gone is no damaged block
    with pytest.raises(ValueError, match="the server answers 503"):
        next(load("webdataset", server.url, on_corrupt="skip", retries=0))


def test_fsspec_opens_other_stores(folder: Path):
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/latents/{file.name}", file.read_bytes())
    remote = load("webdataset", "memory://latents")
    local = load("webdataset", folder)
    for _ in range(9):
        assert_same(next(remote), next(local))
    with pytest.raises(ValueError, match=r"memory://nowhere/manifest.json is missing"):
        load("webdataset", "memory://nowhere")
    with pytest.raises(
        ValueError, match=r"nosuch://x/manifest.json cannot be read: Protocol not known: nosuch"
    ):
        load("webdataset", "nosuch://x")


def test_a_shard_of_another_set_is_not_taken(folder: Path):
    """Same name, same length, other content."""
    write_shard(folder / "train-00001.tar", random_samples(20, seed=7))
    with pytest.raises(
        ValueError, match=r"train-00001.tar \(samples \d+–\d+ of train\) is damaged: its sha256"
    ):
        list(zip(range(10), load("webdataset", folder), strict=False))
