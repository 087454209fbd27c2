"""Measures training: `python -m scripts.bench <command> key=value …`.

    gpu           all commands below on a GPU, within a budget of seconds; run it again to continue
    publish       pages, and the tables of README and docs, from results: folders or archives
    floor         what a step should take on a card, from bytes and FLOPs alone; needs no GPU
    carry         the packages that a GPU host without a network lacks, for pip
    pack          photos and an autoencoder in one file, photos.zip, for `photos`

    doctor        the machine, and its measured rates
    tests         the tests that need a GPU: some of every kind, then file by file
    ladder        from a newcomer's loop to runtime=max, with one more technique per rung
    techniques    each technique alone over eager in fp32 and bf16, and removed from max;
                  batch sizes, micro-batches, optimizers and loader workers over eager too
    kernels       each fused operator beside its definition: time, share of the copy rate
    mixers        a training step of each mixer at equal parameters
    data          samples per second of each loader, and of the usual pipelines
    step          one configuration by phases
    compiling     start-up and graphs of the compiled model, beside those of its compiled blocks
    profile       the ops that take most of a step, by PyTorch's profiler, and its trace
    precision     fp32, bf16 and fp16: losses over several seeds
    memory        small optimizer states, bf16 weights, fp8, offload: loss, bytes, seconds
    plan          the memory that scripts.plan predicts, and the measured memory
    counted       the memory that techniques save on an H100, counted without one
    photos        what two minutes of training buy on the photos that `pack` wrote: distances, grid
    speedrun      how many times faster than a baseline a run learns: docs/speedrun.md

`<command> --help` lists the command's own keys; any other `key=value` is an override of the
training configuration, on top of the `setting`. The bench writes each result to a file in `out` at
once, and does not measure it again while hardware, versions of torch and Triton, keys, and the
project's code stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.config.compose import read_config
from common.config.schema import Natural, Positive

Figures = dict[str, Any]
"""Result of a measurement: name of a figure with its unit, such as step_ms -> number or text."""
Words = list[str]
"""Arguments of a command line, such as runtime.tf32=true: overrides of the training configuration,
and keys of the bench's commands."""

HELP = __doc__ or ""
"""The text of --help."""
FOLDER = Path(__file__).parent
TABLES: dict[str, Any] = {"guides": read_config(FOLDER / "guides.yaml")}
"""Content of the YAML files: sizes of model and data, and rows of cases (cases.yaml), what the
command `gpu` runs (queue.yaml), and the tables and pages that are made of results (pages.yaml);
`guides` (guides.yaml) has what guides promise of techniques."""
for name in ("cases", "queue", "pages"):
    TABLES |= read_config(FOLDER / f"{name}.yaml")


class Case(NamedTuple):
    """One measurement: its name, the overrides of the training configuration, and the function that
    a child process calls to measure it."""

    name: str
    measure: Callable[[Case, Any], Figures]
    """Function that takes the case and the command's keys, measures the case, and returns its
    figures. It is defined at module level, because the case is pickled for the child process."""
    overrides: Words = []  # noqa: RUF012  # never changed
    baseline: Words = []  # noqa: RUF012
    """Overrides of the run with which the case is compared. The two runs are timed alternately."""
    needs: Words = []  # noqa: RUF012
    """Overrides that this machine must support, such as runtime.tf32=true. If the machine does not
    support one of them, the case is not measured, and its result is the reason."""
    labels: Figures = {}  # noqa: RUF012
    """Entries of the result that need no measurement, such as the technique's key."""

    @property
    def compiles(self) -> bool:
        compiling = {"runtime.compile=true", "runtime=max", "runtime=production"}
        return bool(compiling & {*self.overrides, *self.needs})


@dataclass(frozen=True)
class BenchConfig:
    """Keys that all commands that measure have. If `steps` or `repeats` is 0, its value comes from
    the `setting`."""

    setting: str | None = None
    """Model, batch and latents, an entry of `settings` in scripts/bench/cases.yaml; tiny; s32, s256
    (model size s, batch of 32 or 256); s32x512 (batch of 32, 512 tokens); or b256. For speedrun
    digits (16 tokens), deep (64 tokens, eight blocks) or photos; for photos photos128. null: digits
    or photos128 for these two, for others s256 on a machine with a GPU, else tiny."""
    steps: Natural = 0
    """Training steps in one round."""
    repeats: Natural = 0
    """Number of rounds; each round times `steps` steps of every compared run."""
    loss_steps: Natural = 0
    """Number of training steps for which the loss is compared with the baseline's, as the mean of
    the second half of these steps; 0: as many as `steps`."""
    inductor: bool = True
    """Measure the cases that compile with Inductor too, which takes minutes on a CPU."""
    name: str | None = None
    """Name of the results' folder in `out`; null: <command>_<setting>."""
    out: str = "bench"
    """The folder to which the command writes its results."""
    again: str | None = None
    """Which cases to measure again; all; failed: those whose stored result is an error; null: none,
    only cases that have no stored result of the present code."""
    rows: Words = field(default_factory=list)
    """Names, or beginnings of names, of the cases to measure; empty: all."""


@dataclass(frozen=True)
class LadderConfig(BenchConfig):
    """Keys of the command `ladder`, which starts from a plain PyTorch loop and adds technique after
    technique."""

    num_workers: int = 4
    """Number of worker processes of the DataLoader in the newcomer's loop, the plain PyTorch loop
    from which the ladder starts."""


@dataclass(frozen=True)
class TechniquesConfig(BenchConfig):
    """Keys of the command `techniques`, which adds each technique to runtime=eager and removes it
    from runtime=max."""

    precisions: Words = field(default_factory=lambda: ["fp32", "bf16"])
    """Precisions of the baselines (runtime=eager) to which techniques are added."""


@dataclass(frozen=True)
class MixersConfig(BenchConfig):
    """Keys of the command `mixers`, which compares families of models."""

    size: str = "s"
    """Size of the models: xs, s, b, l or xl."""
    families: Words = field(default_factory=list)
    """Families of models, such as mamba, to compare with attention; empty: all."""


@dataclass(frozen=True)
class SeedsConfig(BenchConfig):
    """Keys of the commands `precision` and `memory`; each seed trains for `steps` steps."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Seeds of the runs, one run for each."""


@dataclass(frozen=True)
class SpeedrunConfig(SeedsConfig):
    """Keys of the command `speedrun`, which measures rows of the leaderboard in docs/speedrun.md.

    Without overrides the command measures the rows of cases.yaml, with overrides one row that has
    them. Overrides of the data, of sampling and of `fd` apply to the baseline too.
    """

    baseline: str = "mamba"
    """Name of the row with which the others are compared."""
    total_samples: Positive = 25_600
    """Training samples of the baseline's runs."""
    speedups: list[float] = field(default_factory=lambda: [1.0, 1.25, 1.5, 2.0, 2.5, 3.0])
    """Speed-ups to try, in ascending order, until every figure is worse than the baseline's."""
    sets: Positive = 2
    """Number of sets of generated samples over which a distance is averaged."""
