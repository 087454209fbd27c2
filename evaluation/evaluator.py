"""Compares samples with a reference: for `scripts.evaluate`, and for a run while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from common.errors import UserError
from common.files import read_object, write_atomically
from common.text import as_json
from data.loader import LatentSpec
from evaluation.distances import NEIGHBOURS, ROWS, FeatureStats, distances, floor, too_few
from evaluation.features import build_features
from evaluation.reference import decoded, folder_source, reconstructions, reference_stats
from models.autoencoders import Autoencoder
from sampling.load import SampleStream, labels_in_turn, protocol_of
from training.assemble import Training
from training.checkpoint.load import difference
from training.config.schema import FdConfig
from training.distributed.ranks import Ranks
from training.evaluate import shared
from training.goodput import CLOCK

PROTOCOL = "fd_protocol.json"
QUANTISATION = "uint8, rounded to the nearest value"


class Evaluator:
    """The feature spaces, and the features of the reference in each.

    All processes build it together; the first one has the reference's features.
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
        blank = torch.zeros(1, spec.channels, spec.height, spec.width, device=device)
        with torch.no_grad():
            example = autoencoder.decode(blank)
        spaces = build_features(cfg, autoencoder, example)
        self.spaces = {name: space.to(device) for name, space in spaces.items()}

        if cfg.reference is not None:
            height, width = example.shape[2:]
            self.source = folder_source(cfg.reference, (height, width), cfg.reference_count)
        elif data is not None:
            self.source = reconstructions(data, spec, autoencoder, device, cfg.reference_count)
        else:
            raise UserError(
                "reference is not set, and weights= names no training data; give "
                "reference=<folder>."
            )
        self.reference = reference_stats(self.source, self.spaces, device, ranks)

    def of(self, images: UInt8[Tensor, "B H W 3"]) -> dict[str, Tensor]:
        """Computes the features of images in each space, as fp32 on the CPU."""
        return {name: space(images.to(self.device)).cpu() for name, space in self.spaces.items()}

    def of_latents(self, latents: Float[Tensor, "B C h w"]) -> dict[str, Tensor]:
        """Computes the features of raw latents, decoded and quantised as the reference's are."""
        return self.of(decoded(self.autoencoder, latents))

    def stats_of(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, FeatureStats]:
        """Sums up features of samples, by space, that arrive in batches."""
        stats = {name: FeatureStats(space.dim) for name, space in self.spaces.items()}
        for batch in batches:
            for name, features in batch.items():
                stats[name].add(features)
        return stats

    def protocol(self) -> dict[str, Any]:
        """Returns what the figures depend on, beside the samples."""
        return {
            "reference": self.source.told,
            "features": {name: space.describe() for name, space in self.spaces.items()},
            "quantisation": QUANTISATION,
            "rows": ROWS,
            "neighbours": NEIGHBOURS,
        }


class InRun:
    """Computes `fd_<space>` and `kd_<space>` of a model in training, each time of the same samples.

    ValueError where `fd.count` samples are too few for the distance that `keep_best` names.
    """

    def __init__(self, training: Training, autoencoder: Autoencoder) -> None:
        cfg = training.cfg
        spec = training.loader.spec
        device = training.device
        self.training = training
        self.count = cfg.fd.count
        self.evaluator = Evaluator(cfg.fd, spec, cfg.data, autoencoder, device, training.ranks)
        batch_size = max(1, training.micro_batch // 2)  # guidance doubles it
        labels = labels_in_turn(spec.labels, device)
        self.stream = SampleStream(
            training.step.forward, spec, cfg.sampling, labels, 0, batch_size, device
        )

        for name, space in self.evaluator.spaces.items():
            why = too_few(min(self.count, self.evaluator.source.count), space.dim)
            if why and cfg.keep_best == f"fd_{name}":
                raise UserError(f"keep_best={cfg.keep_best}: {why}")
            if why:
                training.ranks.say(f"fd_{name} is left out: {why}")

    def record(self, folder: Path) -> None:
        """Writes what the figures depend on to the run's folder.

        ValueError if the run has figures of another protocol.
        """
        self.training.ranks.agreed(lambda: self.write(folder / PROTOCOL))

    def write(self, file: Path) -> None:
        """Writes the protocol and the floors, unless `file` has them of another protocol."""
        samples = protocol_of(self.training.stack, self.stream, self.count, "balanced")
        told = json.loads(json.dumps(samples | self.evaluator.protocol() | {"weights": "ema"}))
        if file.is_file():
            found = read_object(file)
            earlier = {key: found.get(key) for key in told}
            if isinstance(earlier["reference"], dict):
                earlier["reference"].pop("name", None)
            changed = difference(earlier, told | {"reference": self.evaluator.source.identity})
            if changed:
                raise UserError(
                    f"{file.parent} has distances of another protocol: {changed}. Set that back, "
                    "or fd_every=0, or use a new run_dir: figures of two protocols do not make one "
                    "curve."
                )
        floors = {name: floor(stats) for name, stats in self.evaluator.reference.items()}
        write_atomically(file, as_json(told | {"floors": floors}, indent=1) + "\n")

    @CLOCK.spending("evaluation")
    def __call__(self) -> dict[str, float]:
        """Draws and compares; the first process has the figures, the others only the seconds.

        Samples that are not finite have no figures: a warning says so, and training goes on.
        """
        began = time.perf_counter()
        ranks = self.training.ranks
        count = -(-self.count // self.stream.batch_size)

        def look(number: int) -> tuple[bool, dict[str, Tensor]]:
            _, latents = self.stream.batch(number)
            return bool(latents.isfinite().all()), self.evaluator.of_latents(latents)

        with self.training.state.averaged(), torch.no_grad():
            drawn = shared(range(count), count, "batches of distances", ranks, look)
        figures: dict[str, float] = {}
        if not all(finite for finite, _ in drawn):
            ranks.say("warning: samples are not finite, so they have no distances")
        elif ranks.first:
            spaces = self.evaluator.spaces
            samples = {n: torch.cat([found[n] for _, found in drawn])[: self.count] for n in spaces}
            for name, stats in self.evaluator.stats_of([samples]).items():
                distance = distances(stats, self.evaluator.reference[name])
                if distance["fd"] is not None:
                    figures[f"fd_{name}"] = distance["fd"]
                figures[f"kd_{name}"] = distance["kd"]
        return figures | {"distances_s": time.perf_counter() - began}
