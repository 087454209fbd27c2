"""Subjects of the fuzzer: the manifest, the blocks and the shards of a latent set, and where its
blocks lie.

Hashes, lengths and counts are made right again after most mutations, so that a reader gets to what
was mutated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from data.loader import LatentTensors, draw_samples
from data.manifest import make_spec, read_manifest
from data.resident import ResidentLatents
from data.source import open_source
from data.streamed import StreamedLatents
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.fuzz import Say, as_json, ended, is_unfit, mutate_bytes, mutate_file, mutate_tree
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import CPU


@cache
def good_files() -> dict[str, bytes]:
    """A set of 13 samples to train on in two shards of 4 + 4 and 4 + 1, and 6 held out, of
    2×2×2."""
    shards = [("train", 8, 0), ("train", 5, 1), ("held_out", 6, 2)]
    with TemporaryDirectory() as folder:
        parts = [(split, random_samples(count, seed, (2, 2, 2))) for split, count, seed in shards]
        save_latent_set(Path(folder), parts)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def good_set(folder: Path) -> dict[str, Any]:
    """Writes the set to `folder`, and returns its manifest."""
    for name, content in good_files().items():
        (folder / name).write_bytes(content)
    return json.loads(good_files()["manifest.json"])


def settle(folder: Path, raw: Any) -> None:
    """Makes sizes, hashes and counts of a manifest true again, as far as it still has them."""
    for shard in raw["shards"]:
        content = (folder / shard["file"]).read_bytes()
        shard |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for block in shard["blocks"]:
            block[3] = hashlib.sha256(content[block[0] : block[0] + block[1]]).hexdigest()
        shard["count"] = sum(block[2] for block in shard["blocks"])
    for split, key in (("train", "count"), ("held_out", "held_out")):
        raw[key] = sum(shard["count"] for shard in raw["shards"] if shard["split"] == split)


def write(folder: Path, raw: Any, settled: bool = True) -> None:
    if settled:
        with contextlib.suppress(Exception):  # the mutation may have left nothing to make true
            settle(folder, raw)
    (folder / "manifest.json").write_bytes(as_json(raw))


def manifest(rng: Random, folder: Path, say: Say) -> None:
    """manifest.json, by structure or by bytes."""
    raw = good_set(folder)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        say(mutate_tree(rng, raw))
    write(folder, raw, settled=rng.random() < 0.6)
    if rng.random() < 0.15:
        say(mutate_file(rng, folder / "manifest.json"))
    use_set(rng, folder)


def block(rng: Random, folder: Path, say: Say) -> None:
    """The safetensors of a block: its bytes, its header, or its tensors."""
    raw = good_set(folder)
    shard = rng.choice(raw["shards"])
    content = (folder / shard["file"]).read_bytes()
    payloads = [content[offset : offset + size] for offset, size, _, _ in shard["blocks"]]
    number = rng.randrange(len(payloads))
    payloads[number], words = rng.choice((mutate_payload, mutate_header, mutate_tensors))(
        rng, payloads[number]
    )
    say(f"block {number} of {shard['file']}: {words}")
    (folder / shard["file"]).write_bytes(b"".join(bytes(512) + payload for payload in payloads))
    offset = 0
    for payload, described in zip(payloads, shard["blocks"], strict=True):
        described[:2] = offset + 512, len(payload)
        offset += 512 + len(payload)
    if rng.random() < 0.2:
        shard["blocks"][number][2] = rng.choice((0, 1, 2, 5, 2**40))
        say(f"said to hold {shard['blocks'][number][2]} samples")
    write(folder, raw)
    use_set(rng, folder)


def mutate_payload(rng: Random, payload: bytes) -> tuple[bytes, str]:
    return mutate_bytes(rng, payload)


def mutate_header(rng: Random, payload: bytes) -> tuple[bytes, str]:
    """Changes a safetensors header, and states its length as it then is."""
    size = struct.unpack("<Q", payload[:8])[0]
    header = json.loads(payload[8 : 8 + size])
    words = mutate_tree(rng, header)
    encoded = as_json(header)
    return struct.pack("<Q", len(encoded)) + encoded + payload[8 + size :], f"header: {words}"


def mutate_tensors(rng: Random, payload: bytes) -> tuple[bytes, str]:
    tensors = load(payload)
    name = rng.choice(sorted(tensors))
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "as float32": lambda t: t.float(),
        "as bool": lambda t: t.bool(),
        "as int64": lambda t: t.long(),
        "as complex": lambda t: t.to(torch.complex64),
        "as float8": lambda t: t.float().to(torch.float8_e4m3fn),
        "NaN": lambda t: t.float().fill_(float("nan")).to(t.dtype),
        "infinite": lambda t: t.float().fill_(float("inf")).to(t.dtype),
        "times -1": lambda t: -t,
        "plus 1": lambda t: t + 1,
        "times 10000": lambda t: t * 10_000,
        "without samples": lambda t: t[:0],
        "one sample fewer": lambda t: t[1:],
        "one dimension more": lambda t: t[None],
        "transposed": lambda t: t.transpose(0, -1),
        "flat": lambda t: t.flatten(),
        "one number": lambda t: t.flatten()[0],
    }
    words = rng.choice([*changes, "left out", "renamed", "all without samples"])
    if words == "all without samples":
        tensors = {name: tensor[:0] for name, tensor in tensors.items()}
    elif words in changes:
        tensors[name] = changes[words](tensors[name])
    else:
        tensor = tensors.pop(name)
        tensors |= (
            {rng.choice(("", "x" * 300, "ids", "\n", "std ")): tensor} if words == "renamed" else {}
        )
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}), f"{name} {words}"


def shard(rng: Random, folder: Path, say: Say) -> None:
    """The tars, and where the manifest says that their blocks lie."""
    raw = good_set(folder)
    files = sorted(folder.glob("*.tar"))
    one, other = rng.sample(files, 2)
    kind = rng.choice(("bytes", "swap", "copy", "folder", "missing", "places", "places", "places"))
    if kind == "bytes":
        say(mutate_file(rng, one))
    elif kind == "places":
        found = rng.choice(rng.choice(raw["shards"])["blocks"])
        which = rng.randrange(3)
        by = rng.choice((1, -1, 8, 512, -512, 1024, 2**40, 2**62))
        found[which] += by
        say(f"{('offset', 'size', 'samples')[which]} of a block moved by {by}")
    else:
        content = one.read_bytes()
        one.unlink()
        if kind == "swap":
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif kind == "copy":
            one.write_bytes(other.read_bytes())
        elif kind == "folder":
            one.mkdir()
        say(f"{one.name}: {kind} ({other.name})")
    write(folder, raw, settled=rng.random() < 0.7)
    use_set(rng, folder)


def use_set(rng: Random, folder: Path) -> None:
    """Reads the set in every way; AssertionError unless each reader gives right samples or a
    sentence."""
    on_corrupt = rng.choice(("error", "skip"))
    shared: dict[str, Any] = {
        "path": str(folder),
        "batch_size": 5,
        "seed": 0,
        "device": CPU,
        "on_corrupt": on_corrupt,
    }
    alive = []  # until the process ends, for a loader that is collected waits for its thread
    readers: list[Callable[[], Any]] = [
        lambda: ResidentLatents(**shared),
        lambda: ResidentLatents(**shared, device_memory_gib=1.2e-6),
        lambda: StreamedLatents(**shared, window=4, num_workers=0),
        lambda: verify(VerifyConfig(path=str(folder), count=0)),
    ]

    def use(reader: Callable[[], Any]) -> None:
        alive.append(found := reader())
        if isinstance(found, list):
            assert not any(map(is_unfit, found)), found
        else:
            check_samples(found, folder, on_corrupt)

    rng.shuffle(readers)
    for reader in readers[1:]:
        ending, text = ended(lambda *_, reader=reader: use(reader), 0, folder, print)
        if ending not in ("success", "sentence"):
            raise AssertionError(f"{ending}: {text}")
    use(readers[0])


def rows_of(folder: Path, split: str) -> dict[int, dict[str, torch.Tensor]]:
    """Id -> tensors of each sample whose block has the hash that the manifest says, read without
    the project's code."""
    rows = {}
    first = 0
    for described in json.loads((folder / "manifest.json").read_text())["shards"]:
        for offset, size, samples, sha256 in (
            described["blocks"] if described["split"] == split else ()
        ):
            with (
                contextlib.suppress(OSError, SafetensorError, IndexError),
                (folder / described["file"]).open("rb") as stream,
            ):
                stream.seek(offset)
                content = stream.read(size)
                if hashlib.sha256(content).hexdigest() == sha256:
                    tensors = load(content)
                    rows |= {
                        first + i: {name: t[i : i + 1] for name, t in tensors.items()}
                        for i in range(samples)
                    }
            first += samples
    return rows


def check_samples(loader: ResidentLatents | StreamedLatents, folder: Path, on_corrupt: str) -> None:
    """AssertionError unless an epoch has each sample once, with its own latents, finite, and a
    label of a class."""
    read = read_manifest(str(folder))
    normalise = make_spec(read, open_source(str(folder)), "channel").make_normaliser(CPU)
    splits = {
        "train": [next(loader) for _ in range(-(-read.count // 5))],
        "held_out": list(loader.held_out(4)),
    }
    for split, batches in splits.items():
        rows = rows_of(folder, split)
        seen = set()
        for batch in batches:
            of_batch = [rows[id_] for id_ in batch.ids.tolist()]
            name = f"samples {batch.ids.tolist()} of {split}"
            original = {key: torch.cat([row[key] for row in of_batch]) for key in of_batch[0]}
            train = split == "train"
            raw = (
                draw_samples(LatentTensors(**original), 0, batch.position)
                if train
                else original["latents"]
            )
            assert torch.equal(batch.latents, normalise(raw)), f"{name} are others"
            assert batch.latents.isfinite().all(), f"{name} are not finite"
            assert torch.equal(batch.labels, original["labels"]), f"{name} have other labels"
            assert batch.labels.min() >= 0, f"{name} have labels below 0"
            assert batch.labels.max() < max(1, len(read.class_names)), (
                f"{name} have labels above the classes"
            )
            seen.update(batch.ids.tolist())
        if on_corrupt == "error":
            assert len(seen) == (read.count if split == "train" else read.held_out), (
                f"not all samples of {split}"
            )
