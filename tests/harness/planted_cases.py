"""Cases with planted faults, for the runner of the benchmarks.

`python -m tests.harness.planted_cases <folder>` runs two good cases and one that hangs.
"""

import os
import signal
import sys
import time
from multiprocessing import get_start_method
from pathlib import Path

import torch

from scripts.bench.cases import BenchConfig, Case, Job
from scripts.bench.runner import Runner


def value(case, cfg):
    return {"value": case.name, "workers": get_start_method()}


def raises(case, cfg):
    raise TypeError("planted")


def exhausts(case, cfg):
    raise torch.OutOfMemoryError("planted, of 80 GiB")


def hangs(case, cfg):
    time.sleep(1000)
    return {}


def is_killed(case, cfg):
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def plan_job(*measures, seconds=0.1):
    cases = [Case(f"case {i}", measure) for i, measure in enumerate(measures)]
    cfg = BenchConfig(setting="tiny", name="step_tiny")
    return Job("python -m scripts.bench step", cfg, cases, seconds)


if __name__ == "__main__":
    # A child finds the functions by this name.
    from tests.harness import planted_cases as planted

    job = planted.plan_job(planted.value, planted.value, planted.hangs, planted.value)
    Runner(Path(sys.argv[1])).run([(job, case) for case in job.cases])
