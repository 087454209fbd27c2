"""Runs one command of the benchmark package."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from math import inf
from typing import TYPE_CHECKING

import scripts.bench
from common.errors import UserError
from training.config.compose import one_sentence

if TYPE_CHECKING:
    from scripts.bench.rows import Benchmark

BENCHMARKS = {
    **{
        name: name
        for name in (
            "ladder",
            "kernels",
            "data",
            "step",
            "saves",
            "hotspots",
            "claims",
            "tests",
            "plan",
        )
    },
    **{name: "machine" for name in ("doctor", "calibration")},
    **{name: "variants" for name in ("techniques", "mixers")},
    **{name: "seeds" for name in ("precision", "memory")},
    "antipatterns": "practices",
}
"""Command that measures rows -> the module that has it in its BENCHMARKS."""
OTHERS = ("gpu", "publish", "trace", "compare")
"""Commands that are the `main` of the module of their name."""
COMMANDS = (*BENCHMARKS, *OTHERS)


def benchmark_of(command: str) -> Benchmark:
    return importlib.import_module(f"scripts.bench.{BENCHMARKS[command]}").BENCHMARKS[command]


def measure(command: str, words: list[str]) -> None:
    """Measures what a command plans, and prints its tables; exits with status 1 if a row failed."""
    from scripts.bench.rows import measure_rows
    from scripts.bench.settings import device_of, parse

    benchmark = benchmark_of(command)
    cfg, overrides = parse(benchmark.config, command, words, benchmark.help)
    if cfg.until < inf:
        threading.Thread(target=leave_with_the_queue, daemon=True).start()
    entries = measure_rows(benchmark, cfg, overrides, device_of(overrides))
    print("", *benchmark.texts(entries), sep="\n", flush=True)
    failed = [entry["name"] for entry in entries if "error" in entry]
    if failed:
        print(
            f"\n{len(failed)} of {len(entries)} rows failed: {', '.join(failed)}", file=sys.stderr
        )
        sys.exit(1)


def leave_with_the_queue() -> None:
    """Ends this process when the queue that started it ends, killed or not: nobody writes into its
    folder then."""
    stdin = os.dup(0)  # pytest points 0 elsewhere
    while os.read(stdin, 1024):
        pass
    if os.getpgrp() == os.getpid():  # the queue's doing: compilers and workers go too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(words: list[str]) -> None:
    """ValueError for a command that there is not."""
    if not words or words[0] in ("-h", "--help"):
        print((scripts.bench.__doc__ or "").strip())
    elif words[0] in BENCHMARKS:
        measure(words[0], words[1:])
    elif words[0] in OTHERS:
        importlib.import_module(f"scripts.bench.{words[0]}").main(words[1:])
    else:
        raise UserError(
            f"bench {words[0]}: there is no such command; choose one of {', '.join(COMMANDS)}."
        )


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with one_sentence():
        main(sys.argv[1:])
