"""Plans a run before it costs anything: whether it fits a GPU, how long it takes, what it costs.

    python -m scripts.plan model=ssd_mlp_xl data=resident data.path=latents/photos \\
        runtime=production batch_size=256 hardware=h100
    python -m scripts.plan <the same> rate_of=runs/my-fastrun price_per_hour=2.5
    python -m scripts.plan largest model=dit_b data=synthetic hardware=h100 batch_size=64
                                        the deepest or widest model that fits, for each
                                        way to save memory
    python -m scripts.plan tune model=ssd_mlp_s data=synthetic
                                        measures the fastest runtime keys here, and writes them
                                        to conf/runtime/tuned.yaml, for runtime=tuned

`hardware` is a GPU model from common/environment.py, or `here` for this machine's GPU, or for its
CPU if it has no GPU. If the run does not fit, the plan names the cheapest change that makes it fit
and counts what each change saves by itself. Hours and cost need a rate: that of an earlier run
(`rate_of`), one that you give (`samples_per_s`), or a share of the GPU's peak (`mfu`). Any word
that sets no key of the command is an override of the training configuration. `--json` prints one
object.
"""

from __future__ import annotations

import sys

from common.errors import UserError
from scripts.commands import end_command, split_words
from scripts.plan import largest, report


def main(words: list[str]) -> None:
    """Runs the command that the first argument names, or plans a run if that is an override."""
    command, *rest = words or ["--help"]
    if "=" in command or command.startswith("-"):
        text = report.plan(*split_words(report.PlanConfig, [command, *rest], __doc__))
    elif command == "largest":
        own = split_words(largest.LargestConfig, rest, largest.__doc__)
        text = largest.compare_ways(*own)
    elif command == "tune":
        text = report.tune(*split_words(report.TuneConfig, rest, __doc__))
    else:
        raise UserError(
            f"plan {command}: there is no such command; give overrides to plan a run, or choose "
            "largest or tune."
        )
    print(text)


if __name__ == "__main__":
    with end_command():
        main(sys.argv[1:])
