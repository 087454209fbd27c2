"""Encodes the parts of a job in processes that start in the same moment. Each is killed a few times
just before it changes a file, and started again."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback

from common.config.compose import compose
from precompute_latents import precompute
from tests.harness.zygote import die_at

LATEST_KILL = 12
"""Changes of files after which a process is killed at the latest."""


def start(part: str, out: str, words: list[str], at_event: int | None) -> int:
    """Forks a process that encodes a part and may die at a change of a file; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        if at_event is not None:
            die_at(at_event, out)
        precompute(compose([*words, f"out={out}", f"part={part}"], "precompute_latents"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def run_parts(parts: int, kills: int, out: str, words: list[str]) -> None:
    """Returns once all parts have ended well, each after so many kills."""
    draw = random.Random(parts)
    running: dict[int, tuple[str, int]] = {}

    def start_again(part: str, kills: int) -> None:
        at_event = draw.randint(1, LATEST_KILL) if kills else None
        running[start(part, out, words, at_event)] = (part, kills)

    for index in draw.sample(range(parts), parts):
        start_again(f"{index}/{parts}", kills)
    while running:
        ended, status = os.wait()
        part, left = running.pop(ended)
        code = os.waitstatus_to_exitcode(status)
        assert code == (-signal.SIGKILL if left else 0), f"part={part} ended with {code}"
        if left:
            start_again(part, left - 1)
