"""Samples of a tiny run, drawn by the command or as a job, also by a command that is killed."""

import os
import signal

from common.config.compose import parse_words
from common.distributed.ranks import SINGLE
from sampling.draw import DrawConfig, ResumableChunks, SampleJob
from scripts.sample import SampleConfig, sample_run
from tests.harness.limits import start_fork


def make_job(run, *words, ranks=SINGLE):
    words = [f"run_dir={run}", "device=cpu", *words]
    return SampleJob(parse_words(DrawConfig, words, ""), ranks)


def draw_samples(run, out, **changes):
    settings = {"run_dir": str(run), "device": "cpu", "out": str(out)}
    settings |= {"count": 1100, "steps": 2, "batch_size": 64} | changes
    return sample_run(SampleConfig(**settings))


def kill_at_piece(dies, command):
    """Runs a command in a process that is killed when it is about to write a piece for which
    `dies(number, folder)` is true."""
    write = ResumableChunks.write

    def write_or_die(self, number, tensors):
        if dies(number, self.folder):
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, number, tensors)

    def run():
        ResumableChunks.write = write_or_die
        command()

    process = start_fork(run)
    process.join()
    assert process.exitcode == -signal.SIGKILL
