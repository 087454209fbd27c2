"""Runs one command of the benchmark package."""

from __future__ import annotations

import importlib
import os
import sys

import scripts.bench
from training.config.compose import one_sentence

OWN = ("ladder", "kernels", "data", "step", "trace", "saves", "compare", "readme")
COMMANDS = {
    **{name: (name, "main") for name in OWN},
    **{name: ("variants", name) for name in ("techniques", "mixers", "precision")},
    **{name: ("practices", name) for name in ("antipatterns", "claims")},
}
"""Command -> its module and its function."""


def main(words: list[str]) -> None:
    """ValueError for a command that there is not."""
    if not words or words[0] in ("-h", "--help"):
        print((scripts.bench.__doc__ or "").strip())
        return
    if words[0] not in COMMANDS:
        raise ValueError(f"bench {words[0]}: there is no such command; choose one of {', '.join(COMMANDS)}.")
    module, function = COMMANDS[words[0]]
    getattr(importlib.import_module(f"scripts.bench.{module}"), function)(words[1:])


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with one_sentence():
        main(sys.argv[1:])
