"""Says what samples are drawn of (classes, the samples of the data, or prompts) and draws them.

Letters: B samples, C channels, H W latent height and width, N entries of a list from which the
samples take theirs in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.counter_noise.draws import Purpose, counter_normal
from accel.stack import AccelerationStack
from common.condition import Condition, EncodedText
from common.config.schema import SamplingConfig, TrainConfig, to_plain
from common.errors import UserError
from common.text import split_lines
from data.loader import LatentLoader
from data.spec import LatentSpec
from models.sampler import draw_normalised, find_shift
from training.inputs import build_loader


@dataclass(frozen=True)
class Conditions:
    """Labels, and texts if there is a table, for any number of samples. Sample i has those of entry
    i mod N, so they depend on i alone."""

    source: Any
    """Value that protocols record: "balanced" for all classes, the numbers of the classes, "data",
    "train" or "held_out" for the samples of the data, or a hash of labels and prompts."""
    labels: Int[Tensor, "N"]
    numbers: Int[Tensor, "N"]
    """Rows of `table`; without one, the labels again."""
    names: list[str]
    """Names of the classes, or texts, by label or by `table.numbers`."""
    table: EncodedText | None = None

    @classmethod
    def of_classes(
        cls, spec: LatentSpec, labels: Sequence[int], source: Any, device: torch.device
    ) -> Conditions:
        """Makes the conditions for samples of these classes, without texts."""
        entries = torch.tensor(labels, device=device)
        return cls(source, entries, entries, spec.names)

    @classmethod
    def of_samples(
        cls, source: str, samples: Samples, loader: LatentLoader, device: torch.device
    ) -> Conditions:
        """Makes the conditions of the samples of a loader that `list_samples` listed."""
        labels = samples[0].to(device)
        captions = loader.captions
        if captions is None:
            return cls(source, labels, labels, loader.spec.names)
        # Keep those rows of the table that are needed: a table with tokens may take gigabytes.
        numbers, rows = samples[1].unique(return_inverse=True)
        table = captions.columns.select(numbers.to(captions.columns.lengths.device))
        return cls(source, labels, rows.to(device), captions.texts, table)

    def __call__(self, position: Int[Tensor, "B"]) -> Condition:
        """Returns the conditions of samples, given by number."""
        place = position % len(self.labels)
        text = self.table and self.table.select(self.numbers[place])
        return Condition(self.labels[place], text)

    def repeat(self, times: int) -> Conditions:
        """Returns these conditions with each entry `times` times in a row."""
        labels = self.labels.repeat_interleave(times)
        return replace(self, labels=labels, numbers=self.numbers.repeat_interleave(times))

    def list_numbers(self) -> list[int]:
        """Returns the places of all N entries in `names`."""
        numbers = self.table.numbers[self.numbers.cpu()] if self.table else self.numbers
        return numbers.tolist() if self.names else []

    def note_rows(self, rows: int, classes: int) -> str:
        """Returns a note for a grid with a row for each of `rows` of the data's classes; empty if
        these are all, or if the rows are texts."""
        return f"{rows} of {classes} classes" if self.table is None and classes > rows else ""

    def list_names(self, count: int) -> dict[str, str]:
        """Returns number, as text -> name, for all classes or texts of the first `count` samples;
        empty if the data has no classes."""
        return {
            str(number): self.names[number] for number in sorted({*self.list_numbers()[:count]})
        }


Samples = Int[Tensor, "2 N"]
"""Labels, and `Condition.numbers`, of samples."""


def list_samples(loader: LatentLoader, source: str, count: int) -> Samples:
    """Lists the first `count` samples of a loader, held-out ones if `source` is "held_out", on the
    CPU. Raises UserError if there are no held-out samples."""
    batches = loader.held_out(loader.batch_size) if source == "held_out" else loader
    conditions = [batch.condition for batch in islice(batches, -(-count // loader.batch_size))]
    if not conditions:
        raise UserError(
            "prompts=held_out: the data has no held-out samples; take prompts=train or a file."
        )
    samples = torch.cat([torch.stack((c.labels, c.numbers)) for c in conditions], dim=1)
    return samples[:, :count].cpu()


def open_data(
    node: dict[str, Any], spec: LatentSpec, seed: int, level: str = "none", batch_size: int = 256
) -> LatentLoader:
    """Opens the data `node` on which a model of the set `spec` was trained; latents go to host
    memory, not onto the device. `level` says what is read of texts (see `LoaderArgs`). Raises
    UserError if the data are another set now."""
    loader = build_loader(node, seed, batch_size, torch.device("cpu"), text=level)
    # Made data have no path, and their fingerprint may have the seed.
    if "path" in node and spec.fingerprint != loader.spec.fingerprint:
        raise UserError(
            f"the run's data are {loader.spec.fingerprint} now, its weights were trained on "
            f"{spec.fingerprint}; restore them, or do without them: reference=<folder>, "
            "labels=balanced, prompts=<file>."
        )
    return loader


def read_prompts(file: str) -> list[str]:
    """Reads a text file with a prompt on each line. Raises UserError if it has none."""
    try:
        lines = split_lines(Path(file).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompts={file} must be held_out, train, or a text file in UTF-8 with a prompt on "
            f'each line ({getattr(error, "strerror", error)}); a text itself is prompt="…".'
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"prompts={file} has no prompt; write one on each line.")
    return prompts


def check_guidance(
    spec: LatentSpec, text_level: str, guidance: float, key: str = "guidance"
) -> None:
    """Raises a UserError if guidance is on (not 1) but the data has no classes and the model reads
    no texts; its message names `key`, the configuration key of `guidance`."""
    if guidance != 1.0 and not spec.num_classes and text_level == "none":
        captions = "model.conditioning=text, for it has captions, or " if spec.text else ""
        raise UserError(
            f"{key}={guidance}: the data has no classes to guide to; set {captions}{key}=1."
        )


@dataclass(frozen=True)
class SampleStream:
    """An endless sequence of samples of a model, numbered from 0. Condition and noise of sample i
    depend only on (seed, i).

    All batches have `batch_size` samples, even if the caller needs fewer: so with the same
    `batch_size` a sample is the same, bit for bit, for any number of samples and on any rank.
    """

    model: Callable[..., Tensor]
    spec: LatentSpec
    sampling: SamplingConfig
    conditions: Conditions
    seed: int
    batch_size: int

    def draw(self, position: Int[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Float[Tensor, "B C H W"]]:
        """Draws samples, given by number: returns the numbers of their classes or texts, and raw
        latents, which the autoencoder can decode."""
        spec = self.spec
        condition = self.conditions(position)
        noise = counter_normal(self.seed, Purpose.SAMPLE, position, spec.shape)
        settings = vars(self.sampling)
        latents = draw_normalised(
            self.model, condition, spec.null_label, noise, position, self.seed, settings
        )
        return condition.numbers, spec.denormalise(latents)

    def draw_batch(self, number: int) -> tuple[Int[Tensor, "B"], Float[Tensor, "B C H W"]]:
        """Draws batch `number`, whose first sample is sample number · batch_size, as `draw`
        does."""
        first = number * self.batch_size
        device = self.conditions.labels.device
        return self.draw(torch.arange(first, first + self.batch_size, device=device))

    def describe_protocol(self, stack: AccelerationStack, count: int) -> dict[str, Any]:
        """Returns setting -> value for all settings, except the weights, on which a metric of
        `count` samples, such as a Fréchet distance, depends.

        These are the settings of the sampler, the data, and the precision in which the model
        computes with the techniques of `stack`.
        """
        sampling = to_plain(vars(self.sampling))
        del sampling["per_class"]
        sampling["shift"] = find_shift(self.sampling.shift, self.spec.shape)
        return {
            "count": count,
            "labels": self.conditions.source,
            "seed": self.seed,
            **sampling,
            **stack.describe_arithmetic(),
            "data": self.spec.fingerprint,
            "autoencoder": self.spec.encoder_sha256 or self.spec.encoder.get("_target_"),
        }


def describe_shifts(cfg: TrainConfig, spec: LatentSpec) -> str:
    """Returns a line that says how the times of training and of samples are shifted; "" if neither
    is."""
    objective = cfg.objective or {}
    shifts = [
        find_shift(shift, spec.shape)
        for shift in (objective.get("timestep_shift"), cfg.sampling.shift)
    ]
    if shifts == [1.0, 1.0]:
        return ""
    return "\ntimes are shifted by {:.3g} in training, by {:.3g} in sampling".format(*shifts)


def draw_streams(
    streams: Sequence[SampleStream], number: int
) -> Iterator[tuple[Int[Tensor, "B"], Float[Tensor, "B C H W"]]]:
    """Draws batch `number` of each stream. If there are several, they must differ in the scale of
    guidance alone, and guided ones come first: until guidance begins, all paths are equal, and the
    model runs for the first stream only."""
    # Velocities of the first stream's calls, up to the first call with a doubled batch.
    kept: list[Tensor] = []
    for stream in streams:
        known = iter([*kept])

        def run(x: Tensor, *args: Any, known: Any = known, **options: Any) -> Tensor:
            # A stream without guidance makes no call with a doubled batch.
            shared = next(known, None)
            if shared is not None and len(shared) == len(x):
                return shared
            velocity = streams[0].model(x, *args, **options)
            if len(streams) > 1 and all(len(v) == streams[0].batch_size for v in kept):
                # Copy, because a CUDA graph of the compiler writes its next result to this memory.
                kept.append(velocity.clone())
            return velocity

        yield replace(stream, model=run).draw_batch(number)
