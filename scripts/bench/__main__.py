"""Runs one command of the benchmark package."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from common.errors import UserError
from scripts.bench import HELP, TABLES, Words
from scripts.commands import end_command

OTHERS = {
    "gpu": "queue.run_queue",
    "publish": "publish.publish",
    "floor": "floor.print_floors",
    "carry": "host.print_carried",
    "pack": "photos.pack_photos",
}
"""Name of a command without cases of its own -> the function that runs it, in this package."""


def measure(command: str, words: Words) -> None:
    """Measures the cases of a command and prints its tables; exits with 1 if a case failed."""
    from scripts.bench.cases import plan_job
    from scripts.bench.rows import format_entries
    from scripts.bench.runner import open_runner

    planned = plan_job(command, words, HELP)
    with open_runner(planned.cfg.out) as runner:
        runner.run([(planned, case) for case in planned.cases], planned.cfg.again)
        entries = runner.list_entries(planned)
    print("", *format_entries(command, entries), sep="\n", flush=True)
    failed = [entry["name"] for entry in entries if "error" in entry]
    if failed:
        sys.exit(f"\n{len(failed)} of {len(entries)} cases failed: {', '.join(failed)}")


def main(words: Words) -> None:
    """Runs the bench command that the first argument names. UserError if there is no such
    command."""
    command, *rest = words or ["--help"]
    known = dict.fromkeys(item["words"].split()[0] for item in TABLES["queue"].values())
    if command in ("-h", "--help"):
        print(HELP.strip())
    elif command in known:
        measure(command, rest)
    elif command in OTHERS:
        module, _, function = OTHERS[command].partition(".")
        getattr(import_module(f"scripts.bench.{module}"), function)(rest)
    else:
        raise UserError(
            f"bench {command}: there is no such command; choose one of "
            f"{', '.join((*known, *OTHERS))}."
        )


if __name__ == "__main__":
    # Silence Python's resource trackers: they warn about leaks of the child processes that the
    # runner kills.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    with end_command():
        main(sys.argv[1:])
