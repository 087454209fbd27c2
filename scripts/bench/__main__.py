"""Runs one command of the benchmark package."""

from __future__ import annotations

import importlib
import os
import sys

import scripts.bench
from training.config.compose import one_sentence

COMMANDS = (
    *("ladder", "techniques", "kernels", "mixers", "data", "step", "trace"),
    *("antipatterns", "precision", "saves", "claims", "compare", "readme"),
)


def main(words: list[str]) -> None:
    """ValueError for a command that there is not."""
    if not words or words[0] in ("-h", "--help"):
        print((scripts.bench.__doc__ or "").strip())
        return
    if words[0] not in COMMANDS:
        raise ValueError(f"bench {words[0]}: there is no such command; choose one of {', '.join(COMMANDS)}.")
    importlib.import_module(f"scripts.bench.{words[0]}").main(words[1:])


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with one_sentence():
        main(sys.argv[1:])
