"""Measures training: `python -m scripts.bench <command> key=value …`.

    gpu           all of it and the tests on a GPU, in slots of minutes; the same command goes on
    publish       pages, and the tables of README and docs, from what was measured

    doctor        the machine, and its measured rates
    calibration   which fused kernels a run of each model would choose here
    tests         the tests that need a GPU: some of every kind, then a file each
    ladder        from what a newcomer writes to runtime=max, one technique more per rung
    techniques    each technique alone over eager in fp32 and bf16, and removed from max;
                  batch sizes, micro-batches, optimizers and loader workers over eager too
    kernels       each fused operator beside its definition: time, share of the copy rate
    mixers        a training step of each mixer at equal parameters
    data          samples a second of each loader, and of the usual pipelines
    step          one configuration by phases: what bounds it, which keys to try next
    profile       the ops that take most of a step, by PyTorch's profiler, and its trace
    saves         what a checkpoint costs, in the background and in the foreground
    precision     fp32, bf16 and fp16: losses over several seeds
    memory        small optimizer states, bf16 weights, fp8, offload: loss, bytes, seconds
    plan          the memory that scripts.plan predicts, beside what is measured
    counted       what techniques save of an H100's memory, counted without one

Keys of the command itself come first (`<command> --help` lists them); any other `key=value` is an
override of the training configuration, on top of the `setting`. Each result is a file in `out` as
soon as it is there, and not measured again while code, hardware, versions and keys are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from training.config.compose import read_config
from training.config.schema import Natural

Figures: TypeAlias = dict[str, Any]
"""What a measure finds: names with units, such as step_ms, to numbers and texts."""
Words: TypeAlias = list[str]
"""Overrides of the training configuration, and keys of commands."""

TABLES = read_config(Path(__file__).with_name("tables.yaml"))
"""What is data: settings, words of cases, the queue of a GPU day, columns of tables."""


class Case(NamedTuple):
    """One measurement: a name, overrides, and who measures it in a process of its own."""

    name: str
    measure: Callable[[Case, Any], Figures]
    """A function of a module, from the case and the command's keys to figures."""
    overrides: Words = []  # noqa: RUF012  # never changed
    baseline: Words = []  # noqa: RUF012
    """Overrides of what it is timed in turn with."""
    needs: Words = []  # noqa: RUF012
    """Words such as runtime.tf32=true; where one cannot be had, the reason is the result."""
    seconds: float = 15.0
    """How long it should take on a GPU, without compiling."""
    labels: Figures = {}  # noqa: RUF012
    """What the result says without measuring."""

    @property
    def compiles(self) -> bool:
        compiling = {"runtime.compile=true", "runtime=max", "runtime=production"}
        return bool(compiling & {*self.overrides, *self.needs})

    @property
    def expected(self) -> float:
        """Seconds that it should take."""
        return self.seconds * (4.0 if self.compiles else 1.0)


@dataclass(frozen=True)
class BenchConfig:
    """Keys that all measuring commands have; 0 and null mean the setting's own."""

    setting: str | None = None
    """tiny, s256, s32, s32x512 or b256; null: s256 on a GPU, tiny without one."""
    steps: Natural = 0
    """Steps in one round."""
    repeats: Natural = 0
    """Rounds."""
    loss_steps: Natural = 0
    """Steps after which losses are compared; 0: as many as a round has."""
    inductor: bool = True
    """False leaves out cases that compile with Inductor, which takes minutes on a CPU."""
    name: str | None = None
    """What the results are called; null: <command>_<setting>."""
    out: str = "bench"
    """The folder that keeps the results."""
    again: str | None = None
    """all, or failed: measures cases again that this code has measured here, or that failed."""


@dataclass(frozen=True)
class LadderConfig(BenchConfig):
    """Keys of `ladder`."""

    num_workers: int = 4
    """Workers of the newcomer's DataLoader."""


@dataclass(frozen=True)
class TechniquesConfig(BenchConfig):
    """Keys of `techniques`."""

    precisions: Words = field(default_factory=lambda: ["fp32", "bf16"])
    """Precisions of the eager baselines."""


@dataclass(frozen=True)
class MixersConfig(BenchConfig):
    """Keys of `mixers`."""

    size: str = "s"
    """xs, s, b, l or xl."""
    families: Words = field(default_factory=list)
    """Those that are compared with attention; empty: all."""


@dataclass(frozen=True)
class SeedsConfig(BenchConfig):
    """Keys of `precision` and `memory`; `steps` are those that each seed trains."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


@dataclass(frozen=True)
class DataConfig(BenchConfig):
    """Keys of `data`."""

    step_ms: float = 100.0
    """How long the loop is busy with a batch, for the share of waiting."""


@dataclass(frozen=True)
class TestsConfig(BenchConfig):
    """Keys of `tests`."""

    select: str = "all"
    """all; smoke: some of every kind, in two minutes; rest: the files one after the other."""
