"""Samples of a tiny run, drawn by the command or as a job."""

from common.config.compose import parse_words
from common.distributed.ranks import SINGLE
from sampling.draw import DrawConfig, SampleJob
from scripts.sample import SampleConfig, sample_run


def make_job(run, *words, ranks=SINGLE):
    words = [f"run_dir={run}", "device=cpu", *words]
    return SampleJob(parse_words(DrawConfig, words, ""), ranks)


def draw_samples(run, out, **changes):
    settings = {"run_dir": str(run), "device": "cpu", "out": str(out)}
    settings |= {"count": 1100, "steps": 2, "batch_size": 64} | changes
    return sample_run(SampleConfig(**settings))
