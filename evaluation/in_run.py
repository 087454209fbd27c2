"""Distances during training: a few samples of the averaged weights, now and then, against the
reference."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.files import read_object, write_atomically
from common.text import as_json
from evaluation.distances import too_few
from evaluation.judge import Judge, JudgeConfig
from evaluation.sides import distances, floor
from models.autoencoders import Autoencoder
from sampling.load import SampleStream, labels_in_turn, protocol_of
from training.assemble import Training
from training.checkpoint.load import difference
from training.evaluate import dealt_and_shown
from training.goodput import CLOCK

PROTOCOL = "fd_protocol.json"


class InRun:
    """`fd_<space>` and `kd_<space>` of a model in training. The same samples mature from call to
    call.

    ValueError where `fd.count` samples are too few for the distance that `keep_best` names.
    """

    def __init__(self, training: Training, autoencoder: Autoencoder) -> None:
        cfg = training.cfg
        spec = training.loader.spec
        self.training = training
        self.count = cfg.fd.count
        files = {"inception": cfg.fd.inception, "dinov2": cfg.fd.dinov2}
        how = JudgeConfig(tuple(cfg.fd.features), cfg.fd.reference, cfg.fd.reference_count, files)
        self.judge = Judge(how, spec, cfg.data, autoencoder, training.device, training.ranks)
        batch = max(1, training.micro_batch // 2)  # guidance doubles it
        labels = labels_in_turn(spec.labels, training.device)
        self.stream = SampleStream(
            training.step.forward, spec, cfg.sampling, labels, 0, batch, training.device
        )
        self.refuse_too_few()

    def record(self, folder: Path) -> None:
        """Writes what the figures depend on beside them; ValueError if the run has figures of
        another protocol."""
        self.training.ranks.agreed(lambda: self.write(folder / PROTOCOL))

    def write(self, file: Path) -> None:
        told = (
            protocol_of(self.training.stack, self.stream, self.count, "balanced")
            | self.judge.protocol()
        )
        told = json.loads(json.dumps(told | {"weights": "ema"}))
        floors = {name: floor(side) for name, side in self.judge.reference.items()}
        earlier = read_object(file) if file.is_file() else told | {"floors": floors}
        then = earlier.get("reference")
        name = then.get("name") if isinstance(then, dict) else None
        moved = {"reference": told["reference"] | {"name": name}}  # the same images
        if changed := difference({key: earlier.get(key) for key in told}, told | moved):
            raise UserError(
                f"{file.parent} has distances of another protocol: {changed}. Set that back, or "
                "fd_every=0, or use a new run_dir: figures of two protocols do not make one "
                "curve."
            )
        write_atomically(file, as_json(told | {"floors": floors}, indent=1) + "\n")

    def refuse_too_few(self) -> None:
        """Says once which distances are left out; ValueError if `keep_best` is one of them."""
        best = self.training.cfg.keep_best
        for name, space in self.judge.spaces.items():
            count = min(self.count, self.judge.source.count)
            if (why := too_few(count, space.dim)) and best == f"fd_{name}":
                raise UserError(f"keep_best={best}: {why}")
            if why:
                self.training.ranks.say(f"fd_{name} is left out: {why}")

    @CLOCK.spending("evaluation")
    def __call__(self) -> dict[str, float]:
        """Draws and compares; the first process has the figures, the others only the seconds.

        Samples that are not finite have no figures: a warning says so, and training goes on.
        """
        began = time.perf_counter()
        ranks = self.training.ranks
        found: list[tuple[int, dict[str, Tensor]]] = []
        finite = True
        with self.training.state.averaged(), torch.no_grad():
            batches = range(-(-self.count // self.stream.batch_size))
            for number, mine in dealt_and_shown(
                batches, len(batches), "batches of distances", ranks
            ):
                _, latents = self.stream.batch(number)
                if mine:
                    finite = finite and bool(latents.isfinite().all())
                    found.append((number, self.judge.of_latents(latents)))
        order = torch.cat(
            ranks.gathered(torch.tensor([number for number, _ in found]).long())
        ).argsort()
        finite = bool(torch.cat(ranks.gathered(torch.tensor([finite]))).all())
        figures: dict[str, float] = {}
        for name, side in self.judge.sides().items():
            mine = (
                torch.stack([features[name] for _, features in found]) if found else torch.zeros(0)
            )
            parts = torch.cat([part for part in ranks.gathered(mine) if len(part)])
            if ranks.first and finite:
                side.add(parts[order].flatten(0, 1)[: self.count])
                distance = distances(side, self.judge.reference[name])
                figures |= {
                    f"{kind}_{name}": distance[kind]
                    for kind in ("fd", "kd")
                    if distance[kind] is not None
                }
        if not finite:
            ranks.say("warning: samples are not finite, so they have no distances")
        return figures | {"distances_s": time.perf_counter() - began}
