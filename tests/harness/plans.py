"""Plans of tiny runs, and processes that exist only in name."""

from contextlib import contextmanager
from functools import cache

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.environment import CARDS
from scripts.plan.report import PlanConfig, forecast_run

PLANNED = [
    "model=ssd_mlp_xs",
    "data=synthetic",
    "data.height=8",
    "data.width=8",
    "data.count=4",
    "model.dim=64",
]
PLANNED_RUN = [*PLANNED, "model.head_dim=32", "model.depth=6", "batch_size=32", "runtime=eager"]


@contextmanager
def pretend_processes(count):
    """Inside, this process is the first of `count`; what it sends goes nowhere."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def forecast_words(*words, gpus=1):
    return forecast_run([*PLANNED_RUN, *words], PlanConfig(gpus=gpus), CARDS["h100"])
