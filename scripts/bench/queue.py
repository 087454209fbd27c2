"""Runs the benchmarks of the `queue` in queue.yaml within a number of seconds, those without a
result first."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.config.compose import parse_words
from common.errors import UserError
from scripts.bench import HELP, TABLES, Words
from scripts.bench.cases import Job, plan_job
from scripts.bench.publish import DOCS, read_pages
from scripts.bench.rows import format_entries, identify
from scripts.bench.runner import open_runner

LIMIT_SECONDS = 480.0
"""Time limit of a case, from the start of its measurement."""


@dataclass(frozen=True)
class GpuConfig:
    """Keys of the command `gpu`."""

    out: str = "bench/gpu"
    """Folder for the results (a file for each case) and for log.txt, the output of the child
    processes."""
    seconds: float = 540.0
    """Time in which all measurements end; the next call goes on behind them."""
    pack: str | None = None
    """Archive (.tar.gz) of all results, written anew after each case, for machines that are given
    back; `publish` takes it. null: none."""
    only: Words = field(default_factory=list)
    """Benchmarks to run: names in the `queue` of queue.yaml, or beginnings of names, such as
    ladder; empty: all."""
    setting: str | None = None
    """Sizes of the benchmarks; tiny: those for two CPU cores; null: those whose results are
    published."""
    again: str | None = None
    """Which cases to measure again; failed: also those whose result, measured with the present
    code, is an error; all: every case; null: the cases without a result, then those whose result
    is of other code."""


def plan_jobs(cfg: GpuConfig) -> list[Job]:
    """Plans the benchmarks of the `queue` that `cfg` selects. UserError if `only` names no item, or
    if `setting` is unknown."""
    queue = TABLES["queue"]
    for only in cfg.only:
        if not any(name.startswith(only) for name in queue):
            raise UserError(f"only=[{only}]: no such item; choose some of {', '.join(queue)}.")
    if cfg.setting not in (None, "tiny"):
        raise UserError(f"setting={cfg.setting}: the queue has setting=tiny, and null.")

    jobs = []
    for name, item in queue.items():
        command, *words = item["words"].split()
        if cfg.only and not name.startswith(tuple(cfg.only)):
            continue
        if cfg.setting:
            if "tiny" not in item:
                continue
            name = f"{name}_tiny"
            words = ["setting=tiny", *item["tiny"].split()]
        job = plan_job(command, [*words, f"name={name}", f"out={cfg.out}"])
        jobs.append(job._replace(seconds=item["seconds"]))
    return jobs


def run_queue(words: Words) -> None:
    """Runs the command `gpu`: measures, in the order of need, the cases for which the time
    suffices, then prints the cases that remain for the next call, and the table of each benchmark
    with a result in the folder."""
    cfg = parse_words(GpuConfig, words, HELP)
    with open_runner(cfg.out, LIMIT_SECONDS, cfg.seconds) as runner:
        runner.pack = Path(cfg.pack).expanduser().absolute() if cfg.pack else None
        runner.published = {
            identify(result.entry["name"], result.environment): result._asdict()
            for page in read_pages(DOCS)
            for result in page.results
        }
        jobs = plan_jobs(cfg)
        left = runner.run([(job, case) for job in jobs for case in job.cases], cfg.again)

        seconds = [runner.estimate_seconds(job) for job, _ in left]
        for (job, case), needed in zip(left, seconds, strict=True):
            print(f"remains: {job.cfg.name}, {case.name}, about {needed:.0f} s")
        for job in jobs:
            if (runner.folder / str(job.cfg.name)).is_dir():
                table, *_ = format_entries(job.command.split()[3], runner.list_entries(job))
                print(f"\n{job.cfg.name}\n{table}")
    print(f"about {sum(seconds) / 60:.0f} minutes remain" if left else "nothing remains")
