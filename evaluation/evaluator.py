"""Compares generated samples with reference images: for `scripts.evaluate`, and for a run while it
trains.

The reference is a folder of images, or a run's decoded training latents. The reference's features
are computed once and kept below ~/.cache/fastlatent, so the folder of the reference may be
read-only.

Letters: B images, H W their size, h w the size of their latents, C channels of the latents.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from common.clock import CLOCK
from common.config.schema import FdConfig
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import find_cache_folder, hash_content, read_object, write_json
from common.output import Progress
from common.text import replace_non_finite
from data.order import draw_permutation
from data.spec import LatentSpec
from encoding.decoding import DecodedImages, make_decoding_loader
from encoding.images import RESIZE, has_other_profile, read_with_retries
from encoding.sources import list_images
from evaluation.distances import (
    FIRST_SAMPLES,
    NEIGHBOURS,
    StatsBySpace,
    collect_stats,
    compute_distances,
    compute_floor,
    explain_too_few,
)
from evaluation.features import build_features, decode_images
from models.images import Autoencoder
from sampling.draw import ResumableChunks
from training.assemble import Training
from training.checkpoint.load import describe_difference
from training.drawing import SampleStream, open_data
from training.evaluate import share_work

PROTOCOL_FILE = "fd_protocol.json"
CHUNK_IMAGES = 512
"""Number of images whose features are in one file of the cache."""
BATCH_IMAGES = 64
MIN_IMAGES = 8
Images = Iterator[UInt8[Tensor, "B H W 3"]]


@dataclass(frozen=True)
class ReferenceImages:
    """Reference images: their identity, their number, and a function that reads them."""

    facts: dict[str, Any]
    """Facts about the images by name: `kind` ("images", "reconstructions" or "held_out"), `count`,
    `resize`, and `sha256`, a hash of what determines the pixels."""
    images: Callable[[Iterable[range]], Iterator[Images]]
    """Function that yields, for each given range of image indices, an iterator over the batches of
    these images. Read each iterator to its end before you take the next one."""


def make_folder_source(cfg: FdConfig, height: int, width: int) -> ReferenceImages:
    """Opens the images in `cfg.reference` (a folder of images, WebDataset tars, or a set that
    Hugging Face `datasets` saved), scaled and cropped to `height` × `width` pixels.

    Labels are ignored. If there are more than `cfg.reference_count` images, it takes as many of
    them, the same ones every time. While images are read, it prints which ones cannot be decoded,
    and leaves them out. Raises UserError if the folder has no images, or later, if a file cannot be
    read.
    """
    folder = str(cfg.reference)
    path = Path(folder).expanduser()
    try:
        listed = list_images(path, "none").entries
    except ValueError as error:
        raise UserError(str(error).replace(f"source={path}", f"reference={folder}", 1)) from error
    entries = [listed[i] for i in draw_permutation(len(listed), 0).tolist()[: cfg.reference_count]]

    # Hash the bytes of all images, not only names and sizes: a file of the same name and size may
    # hold another image.
    digest = hashlib.sha256()
    converted = False
    for entry in entries:
        content = read_with_retries(entry)
        digest.update(hashlib.sha256(content).digest())
        converted |= cfg.convert_profile and has_other_profile(content, entry.key)

    def read_batches(wanted: range) -> Images:
        dataset = DecodedImages(
            entries[wanted.start : wanted.stop],
            [height, width],
            convert_profile=cfg.convert_profile,
        )
        workers = int(len(wanted) > BATCH_IMAGES)
        for batch in make_decoding_loader(dataset, BATCH_IMAGES, workers):
            for reason in batch.reasons:
                print(f"reference={folder}: {reason}; it is left out")
            if batch.unread:
                raise UserError(f"reference={folder}: {batch.unread}; remove or mend it.")
            if batch.places:
                yield batch.pixels.permute(0, 2, 3, 1)

    size = height if height == width else f"{height}×{width}"
    facts = {
        "kind": "images",
        "sha256": digest.hexdigest(),
        "resize": f"{RESIZE}, {size}{', convert_profile=true' * converted}",
        "count": len(entries),
    }
    return ReferenceImages(facts, lambda ranges: map(read_batches, ranges))


def make_reconstructions(
    node: dict[str, Any],
    spec: LatentSpec,
    autoencoder: Autoencoder,
    device: torch.device,
    limit: int,
    held_out: bool = False,
) -> ReferenceImages:
    """Makes reference images by decoding the first `limit` training latents of a run, in the
    shuffled order of seed 0, or the `held_out` latents. `node` is the run's data configuration.

    The returned object reads only the latents in the ranges that its caller asks for, into host
    memory. While reading, it raises UserError if the data that `node` names are no longer the set
    that `spec` describes.
    """

    def decode_ranges(ranges: Iterable[range]) -> Iterator[Images]:
        loader = open_data(node, spec, 0, batch_size=BATCH_IMAGES)
        batches: Iterator[Any] = loader
        for wanted in ranges:
            state = loader.state_dict()
            if held_out:
                batches = islice(loader.held_out(BATCH_IMAGES), wanted.start // BATCH_IMAGES, None)
            elif state["samples_seen"] != wanted.start:
                loader.load_state_dict(state | {"samples_seen": wanted.start})
            counts = [min(BATCH_IMAGES, wanted.stop - start) for start in wanted[::BATCH_IMAGES]]
            yield (
                decode_images(
                    autoencoder, spec.denormalise(next(batches).latents[:count]).to(device)
                )
                for count in counts
            )

    identity = [
        spec.fingerprint,
        spec.encoder_sha256 or spec.encoder.get("_target_"),
        spec.mean,
        spec.std,
        {key: node[key] for key in ("_target_", "streams", "window") if key in node},
    ]
    count = open_data(node, spec, 0).held_out_count if held_out else spec.count
    facts = {
        "kind": "held_out" if held_out else "reconstructions",
        "sha256": hash_content(identity),
        "resize": "none",
        "count": min(count, limit),
    }
    return ReferenceImages(facts, decode_ranges)


class Evaluator:
    """Feature spaces by name, and the statistics of the reference's features in each space.

    All processes must build an evaluator at the same time; only the evaluator of the first process
    gets the statistics. Raises UserError if neither `cfg.reference` nor `data` names a reference,
    or if the reference has fewer than `MIN_IMAGES` images.
    """

    def __init__(
        self,
        cfg: FdConfig,
        spec: LatentSpec,
        data: dict[str, Any] | None,
        autoencoder: Autoencoder,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.autoencoder = autoencoder
        self.device = device
        blank = torch.zeros(1, *spec.shape, device=device)
        with torch.no_grad():
            example = autoencoder.decode(blank)
        self.spaces = build_features(cfg, autoencoder, example)

        # Use the folder `cfg.reference` as reference if it is set, else the run's training set.
        name = "the training set" if cfg.reference is None else f"reference={cfg.reference}"
        if cfg.reference is not None:
            self.source = make_folder_source(cfg, *example.shape[2:])
        elif data is not None:
            self.source = make_reconstructions(data, spec, autoencoder, device, cfg.reference_count)
        else:
            raise UserError(
                "reference is not set, and weights= names no training data; give "
                "reference=<folder>."
            )
        self.reference = self.collect_reference_stats(self.source, ranks)

        # Count the images that could be decoded.
        used = ranks.broadcast_result(lambda: next(iter(self.reference.values())).all.count)
        self.source.facts["count"] = used
        if used < MIN_IMAGES:
            raise UserError(
                f"{name} gives {used} images to compare with; give {MIN_IMAGES} or more."
            )

    @CLOCK.count_as("evaluation")
    def collect_reference_stats(self, source: ReferenceImages, ranks: Ranks) -> StatsBySpace:
        """Returns a dict: feature space -> statistics of the images of `source`. The dict is empty
        on all processes but the first.

        All processes share the work. Each feature space has its own folder in the cache, so after a
        space is added to the configuration, only the features of that space are computed.
        """
        caches = {}
        count = source.facts["count"]
        place = find_cache_folder("references")

        # Lock the cache folders in sorted order, as all commands do: otherwise two commands could
        # each hold a lock that the other one waits for.
        for name in sorted(self.spaces):
            job = {"reference": source.facts, "features": self.spaces[name].describe()}
            folder = place / hash_content(job, sort_keys=True)[:32]
            caches[name] = ResumableChunks(folder, job, count, CHUNK_IMAGES, ranks, waits=True)

        missing = {name: set(chunks.list_missing_chunks()) for name, chunks in caches.items()}
        todo = sorted(set().union(*missing.values()))
        if todo:
            ranks.say(
                f"making features ({', '.join(name for name in missing if missing[name])}) of "
                f"{count} images ({source.facts['kind']}); a later run finds them in {place}"
            )
            first, *_ = caches.values()
            ranges = [first.parts[number] for number in todo]
            progress = Progress(
                sum(map(len, ranges)), "images", silent=not ranks.first, lasting=False
            )
            for number, batches in zip(todo, source.images(ranges), strict=True):
                wanted = [name for name in caches if number in missing[name]]
                features = []
                for images in batches:
                    features.append(self.compute_features(images, wanted))
                    progress.advance(len(images))
                if not features:
                    raise UserError("no image of the reference can be decoded; give another.")
                for name in wanted:
                    content = torch.cat([batch[name] for batch in features])
                    caches[name].write(number, {name: content})
            progress.close()

        ranks.wait_for_all()
        spaces = self.spaces if ranks.first else ()
        stats = collect_stats(chunk for name in spaces for chunk in caches[name])
        for chunks in caches.values():
            chunks.close()
        return stats

    def collect_originals(
        self, spec: LatentSpec, data: dict[str, Any] | None, ranks: Ranks
    ) -> list[StatsBySpace]:
        """Returns the statistics of the run's training images and of its held-out images, which are
        decoded as samples are. Those of no images are empty."""
        if data is None:
            return [{}, {}]
        try:
            parts = [
                make_reconstructions(
                    data, spec, self.autoencoder, self.device, FIRST_SAMPLES, held_out
                )
                for held_out in (False, True)
            ]
        except UserError as error:
            ranks.say(f"copied is left out: {error}")
            return [{}, {}]
        return [self.collect_reference_stats(part, ranks) for part in parts]

    def compute_features(
        self, images: UInt8[Tensor, "B H W 3"], spaces: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Computes the features of images in `spaces` (None: in all feature spaces). Returns a
        dict: name of a space -> features, in fp32 on the CPU."""
        images = images.to(self.device)
        return {name: self.spaces[name](images).cpu() for name in spaces or self.spaces}

    def compute_latent_features(self, latents: Float[Tensor, "B C h w"]) -> dict[str, Tensor]:
        """Decodes raw latents to images, rounds these to uint8 like the reference images, and
        computes the features of the images. Returns a dict: name of a space -> features, in fp32 on
        the CPU."""
        return self.compute_features(decode_images(self.autoencoder, latents))

    def describe_protocol(self) -> dict[str, Any]:
        """Returns all settings on which the figures depend, except the settings with which samples
        are drawn."""
        return {
            "reference": self.source.facts,
            "features": {name: space.describe() for name, space in self.spaces.items()},
            "quantisation": "uint8, rounded to the nearest value",
            "rows": FIRST_SAMPLES,
            "neighbours": NEIGHBOURS,
        }


class TrainingDistances:
    """Computes the distances `fd_<space>` and `kd_<space>` of a model while it trains; each call
    draws samples from the same noise and labels.

    Raises UserError if `fd.count` samples are too few for the distance that `keep_best` names.
    """

    def __init__(self, training: Training, autoencoder: Autoencoder) -> None:
        cfg = training.cfg
        spec = training.loader.spec
        device = training.device
        self.training = training
        self.count = cfg.fd.count
        self.evaluator = Evaluator(cfg.fd, spec, cfg.data, autoencoder, device, training.ranks)

        # Guidance doubles the batch: with half a micro-batch, sampling needs no more memory than a
        # training step.
        batch_size = max(1, training.micro_batch // 2)
        conditions = training.choose_conditions("train", self.count)
        self.stream = SampleStream(
            training.step.compute_velocity, spec, cfg.sampling, conditions, 0, batch_size
        )

        for name, space in self.evaluator.spaces.items():
            why = explain_too_few(min(self.count, self.evaluator.source.facts["count"]), space.dim)
            if why and cfg.keep_best == f"fd_{name}":
                raise UserError(f"keep_best={cfg.keep_best}: {why}")
            if why:
                training.ranks.say(f"fd_{name} is left out: {why}")

    def record(self, folder: Path) -> None:
        """Writes the settings on which the distances depend to `PROTOCOL_FILE` in the run's folder.
        Raises UserError if the file already has other settings."""
        self.training.ranks.broadcast_result(lambda: self.write_protocol(folder / PROTOCOL_FILE))

    def write_protocol(self, file: Path) -> None:
        """Writes the settings on which the distances depend, and the distances between the halves
        of the reference, to `file`. Raises UserError if the file already has other settings."""
        samples = self.stream.describe_protocol(self.training.stack, self.count)
        protocol = samples | self.evaluator.describe_protocol() | {"weights": "ema"}

        # Encode the protocol as JSON and decode it, because JSON turns tuples into lists: otherwise
        # equal settings could differ from those in the file.
        protocol = replace_non_finite(protocol)
        if file.is_file():
            content = read_object(file)
            earlier = {key: content.get(key) for key in protocol}

            # Earlier versions named the folder of the reference, which may move.
            if isinstance(earlier["reference"], dict):
                earlier["reference"].pop("name", None)
            changed = describe_difference(earlier, protocol)
            if changed:
                raise UserError(
                    f"{file.parent} has distances of another protocol: {changed}. Set that back, "
                    "or fd_every=0, or use a new run_dir: figures of two protocols do not make one "
                    "curve."
                )
        floors = {name: compute_floor(stats) for name, stats in self.evaluator.reference.items()}
        write_json(file, protocol | replace_non_finite({"floors": floors}))

    @CLOCK.count_as("evaluation")
    def __call__(self) -> dict[str, float]:
        """Draws samples, compares them with the reference, and returns a dict: name of a distance
        -> value. Only the first process gets the distances; every process gets `distances_s`, the
        seconds that the call took.

        If samples are not finite, prints a warning and leaves the distances out.
        """
        start = time.perf_counter()
        ranks = self.training.ranks
        count = -(-self.count // self.stream.batch_size)

        def measure_batch(number: int) -> dict[str, Tensor]:
            _, latents = self.stream.draw_batch(number)
            if not latents.isfinite().all():
                return {}
            return self.evaluator.compute_latent_features(latents)

        with self.training.state.use_averages(), torch.no_grad():
            drawn = share_work(range(count), count, "batches of distances", ranks, measure_batch)
        figures = {}
        if not all(drawn):
            ranks.say("warning: samples are not finite, so they have no distances")
        elif ranks.first:
            samples = {n: torch.cat([batch[n] for batch in drawn])[: self.count] for n in drawn[0]}
            for name, stats in collect_stats([samples]).items():
                distances = compute_distances(stats, self.evaluator.reference[name])
                kinds = ("kd",) if distances["fd"] is None else ("fd", "kd")
                figures |= {f"{kind}_{name}": distances[kind] for kind in kinds}
        return figures | {"distances_s": time.perf_counter() - start}
