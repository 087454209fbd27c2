"""Measures training: `python -m scripts.bench <command> key=value …`.

    gpu           all of it and the tests on a GPU, in slots of minutes; the same command goes on
    publish       pages, and the tables of README and docs, from what was measured

    doctor        the machine, and its measured rates
    calibration   which fused kernels a run of each model would choose here
    tests         the tests that need a GPU: some of every kind, then a file each
    ladder        from what a newcomer writes to runtime=max, one technique more per rung
    techniques    each technique alone over eager in fp32 and bf16, and removed from max
    kernels       each fused operator beside its definition: time, share of the copy rate
    mixers        a training step of each mixer at equal parameters
    data          samples a second of each loader, and of the usual pipelines
    step          one configuration by phases: what bounds it, which keys to try next
    profile       the ops that take most of a step, by PyTorch's profiler, and its trace
    saves         what a checkpoint costs, in the background and in the foreground
    precision     fp32, bf16 and fp16: losses over several seeds
    memory        small optimizer states, bf16 weights, fp8, offload: loss, bytes, seconds
    plan          the memory that scripts.plan predicts, beside what is measured

Keys of the command itself come first (`<command> --help` lists them); any other `key=value` is an
override of the training configuration, on top of the `setting`. Each result is a file in `out` as
soon as it is there, and not measured again while code, hardware, versions and keys are the same.
"""

from pathlib import Path
from typing import Any, TypeAlias

from training.config.compose import read_config

Figures: TypeAlias = dict[str, Any]
"""What a measure finds: names with units, such as step_ms, to numbers and texts."""
Words: TypeAlias = list[str]
"""Overrides of the training configuration, and keys of commands."""

TABLES = read_config(Path(__file__).with_name("tables.yaml"))
"""What is data: settings, words of cases, the queue of a GPU day, columns of tables."""
