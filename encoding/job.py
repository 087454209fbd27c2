"""Plans an encoding job and writes its folder, shards and manifest. If a job was stopped, the same
command continues it. Several commands, which may run at once on different machines, can share a
job: each encodes a part of the shards, and one more writes the manifest.

A shard is a WebDataset tar of blocks (data/manifest.py describes them). Its content depends only on
the list of images, the settings of the job, and the index of the shard. Each finished shard has a
sidecar `<shard>.json` with its description and the sums of its channels; the job does not encode a
shard with a valid sidecar again.

The first command writes job.json. It holds the settings, which every further command compares with
its own, and what the manifest will need: the names of all shards, and what the command that started
last found out about the encoder. So the command that writes the manifest needs no encoder.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from common.config.contradictions import list_sides
from common.config.schema import PrecomputeConfig
from common.environment import describe_environment
from common.errors import UserError
from common.files import (
    LOCK_FILE,
    LOCK_PARTS,
    FolderLock,
    hash_content,
    lock_folder,
    make_folder,
    read_object,
    refuse_changes,
    write_json,
)
from data.manifest import Manifest, Shard
from data.spec import TextSpec
from encoding.caption_job import CaptionJob
from encoding.decoding import list_others
from encoding.images import CONVERTED, RESIZE, ImageEntry, ImageList, join_few
from encoding.shards import WHOLE, Part, compute_channel_statistics, read_finished
from models.autoencoders import ByteAutoencoder, locate_encoder
from models.images import Autoencoder

JOB_FILE = "job.json"
NOT_COMPARED = {"parts", "images", "shards", "manifest", "captions"}
"""Keys of job.json for `write_manifest` and `finish_job`: the number of parts, the names of all
shards, and those fields of the manifest that are known before any shard is encoded; and the place
of the captions, whose content is compared."""
SETTINGS = (
    "resolution background max_megapixels convert_profile flips held_out limit seed same_bytes "
    "batch_size shard_size block_size classes kind dtype"
)
"""Keys of the configuration that determine the content of the shards."""
MANIFEST_SETTINGS = "resolution flips kind dtype seed precision source_sha256"
"""Settings of job.json that the manifest has too."""
NumberedImage = tuple[int, ImageEntry]
"""Pair (index of the image in the shuffled list of the job, image)."""


@dataclass
class Plan:
    """All images of a job, shuffled by the seed and divided into shards, the held-out shards
    first."""

    shards: list[tuple[str, str, list[NumberedImage]]]
    """(file name, split "held_out" or "train", images) of each shard"""
    held_out: int
    images: list[NumberedImage]
    """Images of all shards, in their order."""
    part: Part = WHOLE
    """Part of the shards that this process encodes."""
    captions: CaptionJob | None = None


def plan_shards(images: ImageList, cfg: PrecomputeConfig) -> Plan:
    """Shuffles the images by `cfg.seed` and cuts the list into shards of `shard_size` images, the
    held-out shards first. Raises UserError if no image remains for training."""
    generator = torch.Generator().manual_seed(cfg.seed)
    order = torch.randperm(len(images.entries), generator=generator).tolist()[: cfg.limit]
    chosen = [images.entries[i] for i in order]

    # Put the held-out images first, from their own source if they have one.
    held_out = len(images.held_out)
    if held_out:
        order = torch.randperm(held_out, generator=generator).tolist()
        chosen = [images.held_out[i] for i in order] + chosen
    else:
        held_out = round(cfg.held_out * (len(chosen) if cfg.held_out < 1 else 1))
    if held_out >= len(chosen):
        raise UserError(
            f"held_out={cfg.held_out} of {len(chosen)} images leaves none to train on; lower it."
        )
    present = {entry.label for entry in chosen[:held_out]}
    absent = [name for label, name in enumerate(images.class_names) if label not in present]
    if absent or not present:
        images.notes.append(
            f"{held_out} images are held out, none of {join_few(absent) or 'all'}; held_out="
            "<number or folder> says otherwise; without any, runs have no eval_loss"
        )

    shards = []
    numbered = list(enumerate(chosen))
    for split, part in (("held_out", numbered[:held_out]), ("train", numbered[held_out:])):
        for number, start in enumerate(range(0, len(part), cfg.shard_size)):
            file = f"{split}-{number:05d}.tar"
            shards.append((file, split, part[start : start + cfg.shard_size]))
    return Plan(shards, held_out, numbered)


def list_settings(cfg: PrecomputeConfig) -> dict[str, Any]:
    """Returns the keys of `cfg` that determine the content of the shards, with their values; the
    resolution of squares is a number, however it was given."""
    settings = {key: vars(cfg)[key] for key in SETTINGS.split()}
    height, width = list_sides(cfg.resolution)
    return settings | {"resolution": height if height == width else [height, width]}


def describe_job(
    plan: Plan,
    images: ImageList,
    cfg: PrecomputeConfig,
    autoencoder: Autoencoder,
    shape: tuple[int, ...],
    psnr_db: float,
    precision: str,
) -> dict[str, Any]:
    """Returns the content of job.json: the settings that determine the content of the shards, and
    the keys of `NOT_COMPARED`. `shape` is (C, H, W) of a latent; `precision` is the dtype in which
    the encoder's matrix products really ran, from the acceleration ledger."""
    captions = plan.captions
    shards = {
        "images": [name for name, _, _ in plan.shards],
        "captions": captions.shards if captions else [],
    }
    settings: dict[str, Any] = {
        **list_settings(cfg),
        "precision": precision,
        "source_sha256": images.sha256(),
        "encoder_sha256": autoencoder.weights_sha256,
        "text_encoder": None,
        **(captions.settings_of_content if captions else {}),
    }

    fields = {
        **{key: settings[key] for key in MANIFEST_SETTINGS.split()},
        **describe_autoencoder(autoencoder, cfg.encoder),
        "height": shape[1],
        "width": shape[2],
        "class_names": images.class_names,
        "resize": RESIZE + CONVERTED * cfg.convert_profile,
        "psnr_db": psnr_db,
        "source": str(cfg.source),
        "text": captions and asdict(captions.spec),
    }
    facts = {"parts": Part.parse(cfg.part).count, "images": len(plan.images), "shards": shards}
    return settings | facts | {"manifest": fields}


def refuse_other_source(
    out: Path, earlier: Mapping[str, Any], plan: Plan, settings: Mapping[str, Any]
) -> None:
    """Raises UserError if `earlier`, which is job.json in `out`, is that of a job with other
    images, or with other of those `settings` that are known before an encoder is loaded; also if
    other images of the same names and sizes have replaced those of a finished shard."""
    words = f"out=<new> reuse={out}"
    if not earlier.get("convert_profile"):
        words += " convert_profile=false"
    remedy = f"encode into another folder, {words}, which copies what is the same"
    number = len(plan.images)
    if earlier.get("images", number) != number:
        raise UserError(
            f"out={out} is a set of {earlier['images']} images, and the source now has "
            f"{number}; {remedy}."
        )
    refuse_changes(f"out={out}", earlier, settings, settings.keys() & earlier.keys(), remedy)

    # Compare the first and the last image of each finished shard, of any part, with those that were
    # encoded. Earlier versions stored no hashes.
    for name, _, images in plan.shards:
        sidecar = read_finished(out, name, hashed=False)
        if sidecar and "images" in sidecar:
            ends = [images[0][1], images[-1][1]]
            others = list_others(ends, sidecar["images"], sidecar["skipped"])
            if others:
                raise UserError(
                    f"out={out}: {name} has the latents of another {others[0]} than the source now "
                    f"has; {remedy}."
                )


def claim_folder(out: Path, job: dict[str, Any]) -> None:
    """Writes `job` to job.json in the folder `out`. If the file is there, first compares the
    settings in it with those of `job`. Raises UserError if the folder belongs to another job, or
    if job.json cannot be read."""
    content = read_job(out)
    refuse_changes(f"out={out}", content, job, (job.keys() & content.keys()) - NOT_COMPARED)
    if content | job != content:
        content |= job
        write_json(out / JOB_FILE, content | {"sha256": hash_content(content)})


def read_job(out: Path) -> dict[str, Any]:
    """Returns the content of job.json in the folder `out`, empty if there is none. Raises
    UserError if the file cannot be read, or is not as a job has written it."""
    file = out / JOB_FILE
    try:
        content = read_object(file)
        if content.pop("sha256", None) == hash_content(content):
            return content
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, OSError):
        pass
    raise UserError(
        f"{file} is broken, so nothing says which job this folder belongs to; restore it, or "
        "choose another folder."
    )


@contextmanager
def hold_folder(out: Path, part: Part, job: dict[str, Any]) -> Iterator[None]:
    """Makes the folder `out`, locks the shards of `part` while the `with` block runs, and claims
    the folder for the job (see `claim_folder`).

    Raises UserError if another process holds some of these shards, or if the folder has files but
    no job.json.
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
    with lock_shards(out, part) as lock:
        with lock.take_turn():
            claim_folder(out, job)
        yield


def lock_shards(out: Path, part: Part = WHOLE) -> FolderLock:
    """Locks the shards of `part` in the folder `out`. Raises UserError if another process holds
    some of them, or if the lock file belongs to another user."""
    refusal = f"out={out}: another process works on these shards; wait for it, or stop it first."
    chosen = range(0) if part == WHOLE else part.find_range(LOCK_PARTS)  # length 0: everything
    try:
        return lock_folder(out, refusal, chosen.start, len(chosen))
    except OSError as error:
        raise UserError(
            f"{out / LOCK_FILE} cannot be opened ({error.strerror}); run this command as the user "
            "who began the job."
        ) from error


def describe_autoencoder(autoencoder: Autoencoder, encoder: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the manifest that describe the autoencoder and the software, by name.
    `encoder` is the autoencoder's configuration node."""
    return {
        "encoder": locate_encoder(encoder, autoencoder.revision),
        "encoder_class": autoencoder.kind,
        "encoder_sha256": autoencoder.weights_sha256,
        "scaling_factor": autoencoder.scaling_factor,
        "shift_factor": autoencoder.shift_factor,
        "input_range": [-1.0, 1.0],
        "versions": describe_environment(torch.device("cpu"))["versions"],
    }


def save_manifest(
    out: Path, fields: dict[str, Any], shards: list[Shard], sums: list[dict[str, Any]]
) -> Manifest:
    """Writes `manifest.json` and returns it: `fields` of it, and those that describe the shards and
    the statistics of the channels. `sums` has `ChannelSums.as_dict()` of each training shard."""
    mean, std = compute_channel_statistics(sums)
    manifest = Manifest(
        **fields,
        channels=len(mean),
        mean=mean,
        std=std,
        count=sum(shard.count for shard in shards if shard.split == "train"),
        held_out=sum(shard.count for shard in shards if shard.split == "held_out"),
        shards=shards,
    )
    manifest.write(out)
    return manifest


def write_manifest(out: Path) -> Manifest:
    """Writes `manifest.json` from job.json and the sidecars of all shards, and returns it. Raises
    UserError if no training image was decoded."""
    job = read_job(out)
    names = chain(*job["shards"].values())
    sidecars = [read_object(out / f"{name}.json") for name in names]
    shards = [Shard(**s["shard"]) for s in sidecars if s["shard"]["count"]]
    sums = [s["sums"] for s in sidecars if s["shard"]["split"] == "train"]
    skipped = [line for s in sidecars for line in s["skipped"]]
    if not any(shard_sums["count"] for shard_sums in sums):
        raise UserError(
            f"source={job['manifest']['source']}: no training image can be decoded, such as "
            f"{skipped[0]}; repair or replace some."
        )

    fields = job["manifest"] | {"skipped": skipped}
    if fields["text"] is not None:
        fields["text"] = TextSpec(**fields["text"])
    return save_manifest(out, fields, shards, sums)


def finish_job(out: Path) -> Manifest:
    """Checks the hashes of all shards that the commands of a job have encoded in parts, writes the
    manifest, and returns it. Needs neither the images nor the encoder. Raises UserError that names
    the parts with an absent or damaged shard."""
    if not (out / JOB_FILE).is_file():
        raise UserError(f"out={out} has no {JOB_FILE}; encode its parts first: part=0/8, …")

    with lock_shards(out):
        job = read_job(out)

        groups = list(job["shards"].values())
        names = list(chain(*groups))
        print(f"checking the hashes of {len(names)} shards", flush=True)
        with ThreadPoolExecutor() as pool:
            sidecars = pool.map(partial(read_finished, out), names)
            sidecar_of = dict(zip(names, sidecars, strict=True))
        faults = []
        for index in range(job["parts"]):
            part = Part(index, job["parts"])
            own = chain(*(part.select(group) for group in groups))
            lost = [name for name in own if sidecar_of[name] is None]
            if lost:
                faults.append(f"part={part} ({lost[0]}{', …' if lost[1:] else ''})")
        if faults:
            raise UserError(
                f"out={out}: shards of {join_few(faults)} are absent or damaged; run these parts "
                "again, and then this command."
            )
        return write_manifest(out)


def describe_result(manifest: Manifest, out: Path) -> str:
    """Says what the finished set in the folder `out` holds, and which command trains on it."""
    lines = [f"{manifest.count} training and {manifest.held_out} held-out latents in {out}"]
    if manifest.skipped:
        lines.append(f"{len(manifest.skipped)} images were skipped; manifest.json lists them")
    # Guidance needs classes or captions. If the set has neither, the suggested command switches
    # guidance off by guidance=1.
    guidance = "" if manifest.class_names else " sampling.guidance=1"
    if manifest.text is not None:
        guidance = " model.conditioning=text"
    experiment = "photos"
    if manifest.encoder_class == ByteAutoencoder.kind:
        side = max(manifest.height, manifest.width)
        preset = min((s for s in (64, 128) if s >= side), default=256)
        experiment = f"pixels_{preset}"
        usual = 16 if preset == 256 else 8
        patch = math.gcd(manifest.height, manifest.width, usual)
        if patch < usual:
            guidance += f" model.patch_size={patch} model.patch_rank=0"
    path = shlex.quote(f"data.path={out}")
    lines.append(f"next: python train.py experiment={experiment} {path}{guidance}")
    return "\n".join(lines)
