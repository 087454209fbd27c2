"""Samples of a tiny run, drawn by the command or as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sampling.draw import DrawConfig, SampleJob
from scripts.sample import SampleConfig, sample_run
from training.config.compose import parse_words
from training.distributed.ranks import SINGLE, Ranks


def make_job(run: Path, *words: str, ranks: Ranks = SINGLE) -> SampleJob:
    words = [f"run_dir={run}", "device=cpu", *words]
    return SampleJob(parse_words(DrawConfig, words, ""), ranks)


def draw_samples(run: Path, out: Path, **changes: Any) -> Path:
    settings = {"run_dir": str(run), "device": "cpu", "out": str(out)}
    settings |= {"count": 1100, "steps": 2, "batch_size": 64} | changes
    return sample_run(SampleConfig(**settings))
