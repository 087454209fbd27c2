"""Plans an encoding job and writes its folder, shards and manifest. If a job was stopped, the same
command continues it.

A shard is a WebDataset tar of blocks (data/manifest.py describes them). Its content depends only on
the list of images, the settings of the job, and the index of the shard. Each finished shard has a
sidecar `<shard>.json` with its description and the sums of its channels; the job does not encode a
shard with a valid sidecar again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from common.errors import UserError
from common.files import (
    LOCK_FILE,
    FolderLock,
    hash_file,
    lock_folder,
    make_folder,
    read_object,
    rename,
    sync_folder,
    write_atomically,
    write_json,
)
from data.loader import TextSpec
from data.manifest import MANIFEST_NAME, Block, Manifest, Shard
from encoding.images import RESIZE, ImageEntry, ImageList
from models.images import Autoencoder
from training.config.schema import PrecomputeConfig
from training.environment import describe_environment

JOB_FILE = "job.json"
NumberedImage = tuple[int, ImageEntry]
"""Pair (index of the image in the shuffled list of the job, image)."""


@dataclass
class Plan:
    """All images of a job, shuffled by the seed and divided into shards, the held-out shards
    first."""

    shards: list[tuple[str, str, list[NumberedImage]]]
    """(file name, split "held_out" or "train", images) of each shard"""
    held_out: int
    images: int
    text: TextSpec | None = None
    """Description of the captions; None if the set has none."""
    caption_shards: list[str] = field(default_factory=list)
    """File names of the shards of captions."""


def plan_shards(images: ImageList, cfg: PrecomputeConfig) -> Plan:
    """Shuffles the images by `cfg.seed` and cuts the list into shards of `shard_size` images, the
    held-out shards first. Raises ValueError if no image remains for training."""
    generator = torch.Generator().manual_seed(cfg.seed)
    order = torch.randperm(len(images.entries), generator=generator).tolist()[: cfg.limit]
    numbered = [(index, images.entries[i]) for index, i in enumerate(order)]
    held_out = round(cfg.held_out * len(numbered))
    if held_out == len(numbered):
        raise UserError(
            f"held_out={cfg.held_out} of {len(numbered)} images leaves none to train on; lower it."
        )
    shards = []
    for split, part in (("held_out", numbered[:held_out]), ("train", numbered[held_out:])):
        for number, start in enumerate(range(0, len(part), cfg.shard_size)):
            file = f"{split}-{number:05d}.tar"
            shards.append((file, split, part[start : start + cfg.shard_size]))
    return Plan(shards, held_out, len(numbered))


def describe_job(
    images: ImageList, cfg: PrecomputeConfig, encoder_sha256: str | None, precision: str, plan: Plan
) -> dict[str, Any]:
    """Returns the settings that determine the content of the shards, by name. `precision` is the
    dtype in which the encoder's matrix products really ran, from the acceleration ledger."""
    image_keys = ("resolution", "background", "max_megapixels", "flips", "held_out", "limit")
    job_keys = ("seed", "same_bytes", "batch_size", "shard_size", "block_size")
    captions = [entry.captions[: cfg.max_captions] for entry in images.entries]
    text = {
        "captions_sha256": hashlib.sha256(json.dumps(captions).encode()).hexdigest(),
        "text_tokens": cfg.text_tokens,
        "text_dtype": cfg.text_dtype.value,
    }
    return {
        **{key: getattr(cfg, key) for key in image_keys + job_keys},
        "classes": cfg.classes,
        "kind": cfg.kind.value,
        "dtype": cfg.dtype.value,
        "precision": precision,
        "source_sha256": images.sha256(),
        "encoder_sha256": encoder_sha256,
        "text_encoder": plan.text and plan.text.encoder_sha256,
        **(text if plan.text else {}),
    }


def claim_folder(out: Path, job: dict[str, Any]) -> None:
    """Writes `job` to job.json in the folder `out`, or compares it with the job.json that is there.
    Raises ValueError if the folder belongs to another job, or if job.json cannot be read."""
    file = out / JOB_FILE
    if not file.is_file():
        write_json(file, job)
        return

    try:
        # Add the values of keys that earlier versions did not write, according to which they
        # behaved.
        earlier = {"same_bytes": True, "text_encoder": None} | read_object(file)
    except ValueError as error:
        raise UserError(
            f"{file} is broken, so nothing says which job this folder belongs to; choose "
            "another folder or delete this one."
        ) from error
    # If the manifest exists, the set is finished, perhaps by an earlier version that wrote fewer
    # keys to job.json: compare only the keys that job.json has.
    if (out / MANIFEST_NAME).is_file():
        job = {key: value for key, value in job.items() if key in earlier}
    changes = [f"{k} was {earlier.get(k)}, is {v}" for k, v in job.items() if earlier.get(k) != v]
    if changes:
        raise UserError(
            f"out={out} holds latents of another job ({'; '.join(changes)}); choose another "
            "folder or delete it."
        )


def make_locked_folder(out: Path) -> FolderLock:
    """Makes the folder `out` and locks it until the caller closes the result.

    Raises ValueError if another process holds the lock, or if the folder has files but no job.json.
    """
    try:
        make_folder(out)
        names = {file.name for file in out.iterdir()}
    except OSError as error:
        raise UserError(
            f"out={out} cannot be made or read ({error.strerror}); choose another folder."
        ) from error
    # Accept a folder that has only a lock file and the temporary file of job.json: a process that
    # was killed in `claim_folder` leaves these two behind.
    if JOB_FILE not in names and names - {LOCK_FILE, f"{JOB_FILE}.tmp"}:
        raise UserError(
            f"out={out} is not empty and holds no latents of ours; choose another folder."
        )
    return lock_folder(
        out, f"out={out}: another process is encoding into it; wait for it, or stop it first."
    )


def read_finished(out: Path, name: str) -> dict[str, Any] | None:
    """Returns the content of a shard's sidecar, or None if the shard or the sidecar is absent,
    incomplete or damaged."""
    try:
        sidecar = read_object(out / f"{name}.json")
        digest = sidecar.pop("sha256", None)  # None: an earlier version stored no hash
        complete = hash_file(out / name) == sidecar["shard"]["sha256"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return sidecar if complete and digest in (None, hash_sidecar(sidecar)) else None


def hash_sidecar(sidecar: dict[str, Any]) -> str:
    """Returns the SHA-256 of a sidecar's content, by which a later run detects damage."""
    return hashlib.sha256(json.dumps(sidecar).encode()).hexdigest()


def write_sidecar(
    out: Path, shard: Shard, skipped: Sequence[str] = (), sums: dict[str, Any] | None = None
) -> None:
    """Writes the sidecar of a finished shard. `skipped` are sentences about images that the shard
    lacks, `sums` is `ChannelSums.as_dict()`; captions have neither."""
    sidecar: dict[str, Any] = {"shard": asdict(shard), "skipped": list(skipped), "sums": sums}
    sidecar["sha256"] = hash_sidecar(sidecar)
    write_atomically(out / f"{shard.file}.json", json.dumps(sidecar) + "\n")


@contextlib.contextmanager
def explain_full_disk(out: Path, name: str) -> Iterator[None]:
    """Raises a UserError if the disk gets full while the `with` block writes the shard `name`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"out={out}: no space is left for {name} ({error.strerror}). Finished shards are "
            "kept: free some space and run the same command again; dry_run=true says how much it "
            "takes."
        ) from error


def locate_encoder(node: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """Returns an encoder's configuration node with the full path of a local folder, or with the
    commit `revision` of a hub id."""
    encoder = dict(node)
    folder = os.path.expanduser(encoder.get("path") or "")
    if os.path.isdir(folder):
        encoder["path"] = str(Path(folder).resolve())
    if revision is not None:
        encoder["revision"] = revision
    return encoder


def make_manifest_fields(
    autoencoder: Autoencoder,
    encoder: dict[str, Any],
    shards: list[Shard],
    sums: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns a dict from name to value of the manifest's fields that describe the autoencoder, the
    shards, and the statistics of the channels. `encoder` is the autoencoder's configuration node;
    `sums` is a list with `ChannelSums.as_dict()` of each training shard."""
    mean, std = compute_channel_statistics(sums)
    return {
        "channels": len(mean),
        "mean": mean,
        "std": std,
        "encoder": locate_encoder(encoder, autoencoder.revision),
        "encoder_class": autoencoder.kind,
        "encoder_sha256": autoencoder.weights_sha256,
        "scaling_factor": autoencoder.scaling_factor,
        "shift_factor": autoencoder.shift_factor,
        "input_range": [-1.0, 1.0],
        "count": sum(shard.count for shard in shards if shard.split == "train"),
        "held_out": sum(shard.count for shard in shards if shard.split == "held_out"),
        "versions": describe_environment(torch.device("cpu"))["versions"],
        "shards": shards,
    }


def write_manifest(
    plan: Plan,
    images: ImageList,
    cfg: PrecomputeConfig,
    autoencoder: Autoencoder,
    shape: tuple[int, ...],
    psnr_db: float,
    precision: str,
) -> Manifest:
    """Merges the sidecars of all shards into `manifest.json`, and returns the manifest. `shape` is
    (C, H, W) of a latent. Raises ValueError if no training image was decoded."""
    out = Path(str(cfg.out)).expanduser()
    names = [*(name for name, _, _ in plan.shards), *plan.caption_shards]
    sidecars = [read_object(out / f"{name}.json") for name in names]
    shards = [Shard(**s["shard"]) for s in sidecars if s["shard"]["count"]]
    sums = [s["sums"] for s in sidecars if s["shard"]["split"] == "train"]
    skipped = [line for s in sidecars for line in s["skipped"]]
    if not any(shard_sums["count"] for shard_sums in sums):
        raise UserError(
            f"source={cfg.source}: no training image can be decoded, such as {skipped[0]}; repair "
            "or replace some."
        )

    manifest = Manifest(
        **make_manifest_fields(autoencoder, cfg.encoder, shards, sums),
        height=shape[1],
        width=shape[2],
        class_names=images.class_names,
        kind=cfg.kind.value,
        dtype=cfg.dtype.value,
        flips=cfg.flips,
        resize=RESIZE,
        resolution=cfg.resolution,
        psnr_db=psnr_db,
        precision=precision,
        skipped=skipped,
        source=str(cfg.source),
        source_sha256=images.sha256(),
        seed=cfg.seed,
        text=plan.text,
    )
    manifest.write(out)
    return manifest


def cast_tensors(
    tensors: Mapping[str, Tensor], dtype: str, samples: Sequence[str]
) -> dict[str, Tensor]:
    """Casts all latents of a batch to `dtype`, and moves these tensors to the CPU.
    `samples` are the names of the batch's samples: if a value overflows in `dtype`, a ValueError
    names the first sample with such a value."""
    block = dict(tensors)
    for name in sorted(tensors.keys() - {"labels", "captions"}):
        block[name] = tensors[name].to(getattr(torch, dtype)).cpu()
        bad = ~block[name].isfinite().flatten(1).all(1)
        if bad.any():
            raise UserError(
                f"{samples[int(bad.nonzero()[0])]} has {name} that are too large for "
                f"dtype={dtype}; use dtype=bfloat16 or float32 and another out, or leave it out."
            )
    return block


class ChannelSums:
    """Sums latents, and their squares, per channel in fp64. If the set stores the posterior's std,
    adds std² to the squares: training draws latents from the posterior, and std² is the mean square
    of the noise in them."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds the latents of a batch. `tensors` maps `latents` and, if the set has them, `std`,
        `mirrored` and `mirrored_std` to tensors (B, C, H, W)."""
        for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
            if name in tensors:
                values = tensors[name].double()
                self.count += values.numel() // values.shape[1]
                self.total = self.total + values.sum((0, 2, 3))
                self.squares = self.squares + values.square().sum((0, 2, 3))
                if std_name in tensors:
                    self.squares = self.squares + tensors[std_name].double().square().sum((0, 2, 3))

    def as_dict(self) -> dict[str, Any]:
        total, squares = (
            v.tolist() if isinstance(v, Tensor) else [] for v in (self.total, self.squares)
        )
        return {"count": self.count, "total": total, "squares": squares}


def compute_channel_statistics(sums: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Returns (means, standard deviations), each with one value per channel. `sums` is a list with
    `ChannelSums.as_dict()` of each shard."""
    sums = [s for s in sums if s["count"]]
    count = sum(s["count"] for s in sums)
    mean = torch.tensor([s["total"] for s in sums], dtype=torch.float64).sum(0) / count
    square = torch.tensor([s["squares"] for s in sums], dtype=torch.float64).sum(0) / count
    return mean.tolist(), (square - mean.square()).clamp(min=1e-12).sqrt().tolist()


class ShardWriter:
    """Writes one shard under a temporary name; `close()` syncs it to disk and renames it.

    If `close()` never runs (after an exception or a kill), no file has the final name of the shard.
    """

    def __init__(self, file: Path, split: str, block_size: int) -> None:
        self.file = file
        self.split: Any = split
        self.block_size = block_size
        self.temporary = file.with_name(f"{file.name}.tmp")
        self.stream = self.temporary.open("wb")
        self.tar = tarfile.TarFile(fileobj=self.stream, mode="w")
        self.pending: dict[str, Tensor] = {}
        self.blocks: list[Block] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends samples: tensors on the CPU with equal lengths along the first axis. Writes a
        block whenever `block_size` samples are pending."""
        self.pending = {
            name: torch.cat([self.pending[name], tensor]) if self.pending else tensor
            for name, tensor in tensors.items()
        }
        while len(self.pending["labels"]) >= self.block_size:
            self.write_block()

    def write_block(self) -> None:
        """Writes the first `block_size` pending samples as one safetensors member of the tar."""
        block = {name: t[: self.block_size].contiguous() for name, t in self.pending.items()}
        self.pending = {name: t[self.block_size :] for name, t in self.pending.items()}
        self.write_member(block, len(block["labels"]))

    def write_member(self, block: Mapping[str, Tensor], samples: int) -> None:
        """Writes a block of `samples` samples as the next member of the tar."""
        payload = save(dict(block))
        size = len(payload)
        member = tarfile.TarInfo(f"{self.file.stem}-{len(self.blocks):06d}.safetensors")
        member.size = size
        member.mode = 0o444
        member.uname = member.gname = "fastlatent"
        self.tar.addfile(member, io.BytesIO(payload))

        # tarfile filled the member with zeros up to a multiple of 512 bytes, and the stream now
        # stands behind these zeros. Subtract the zeros and `size` to get the offset of the member's
        # content.
        offset = self.stream.tell() - size - -size % tarfile.BLOCKSIZE
        digest = hashlib.sha256(payload).hexdigest()
        self.blocks.append(Block(offset, size, samples, digest))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the temporary file and deletes it if the `with` block raised an exception."""
        if kind is not None:
            with contextlib.suppress(OSError):  # close() fails on a full disk
                self.stream.close()
            self.temporary.unlink(missing_ok=True)

    def close(self) -> Shard:
        """Writes the pending samples, syncs the file to disk, renames it to the shard's name, and
        returns the shard's description."""
        if len(self.pending.get("labels", ())):
            self.write_block()
        self.tar.close()
        self.stream.flush()
        os.fsync(self.stream.fileno())
        size = self.stream.tell()
        self.stream.close()
        digest = hash_file(self.temporary)
        rename(self.temporary, self.file)
        sync_folder(self.file.parent)
        count = sum(block.samples for block in self.blocks)
        return Shard(self.file.name, self.split, count, size, digest, self.blocks)
