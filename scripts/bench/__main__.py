"""Runs one command of the benchmark package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import scripts.bench
from common.config.compose import read_config, report_user_errors
from common.errors import UserError
from common.files import ROOT
from scripts.bench import TABLES, Words


def measure(command: str, words: Words) -> None:
    """Measures the cases of a command and prints its tables; exits with 1 if a case failed."""
    from scripts.bench.cases import plan_job
    from scripts.bench.publish import format_entries
    from scripts.bench.runner import open_runner

    planned = plan_job(command, words, scripts.bench.__doc__ or "")
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
    if not words or words[0] in ("-h", "--help"):
        print((scripts.bench.__doc__ or "").strip())
        return
    command, *rest = words
    known = dict.fromkeys(item["words"].split()[0] for item in TABLES["queue"].values())
    if command in known:
        measure(command, rest)
    elif command == "gpu":
        from scripts.bench.queue import run_queue

        run_queue(rest)
    elif command == "publish":
        from scripts.bench.publish import publish

        publish([Path(word).expanduser() for word in rest], ROOT)
    elif command == "floor":
        from scripts.bench.floor import print_floors

        print_floors(rest)
    elif command == "carry":
        print(*read_config(Path(__file__).with_name("host.yaml"))["carried"], sep="\n")
    else:
        choices = ", ".join((*known, "gpu", "publish", "floor", "carry"))
        raise UserError(f"bench {command}: there is no such command; choose one of {choices}.")


if __name__ == "__main__":
    # Silence Python's resource trackers: they warn about leaks of the child processes that the
    # runner kills.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    with report_user_errors():
        main(sys.argv[1:])
