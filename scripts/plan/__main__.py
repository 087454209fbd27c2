"""Plans a run before it costs anything: will it fit, how long does it take, what does it cost?

    python -m scripts.plan model=ssd_mlp_xl data=synthetic batch_size=256 hardware=h100 \\
        mfu=0.4 price_per_hour=2.5
    python -m scripts.plan scale model=ssd_mlp_xl data=synthetic mfu=0.4
                                        on N GPUs: where each way stops paying
    python -m scripts.plan tune model=ssd_mlp_s data=synthetic
                                        measures the fastest runtime keys here

Any word that is none of a command's keys is an override of the training configuration. `--json`
prints one object.
"""

from __future__ import annotations

import sys

from common.errors import UserError
from scripts.words import own_and_others
from training.config.compose import one_sentence


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    words = ["json=true" if word == "--json" else word for word in words]
    if words[0] == "scale":
        from scripts.plan.scale import ScaleConfig, scale
        from scripts.plan.scale import __doc__ as text

        print(scale(*own_and_others(ScaleConfig, words[1:], text or "")))
    elif words[0] == "tune":
        from scripts.plan.tune import TuneConfig, tune
        from scripts.plan.tune import __doc__ as text

        print(tune(*own_and_others(TuneConfig, words[1:], text or "")))
    elif "=" in words[0]:
        from scripts.plan.report import PlanConfig, report
        from scripts.plan.report import __doc__ as text

        print(report(*own_and_others(PlanConfig, words, text or "")))
    else:
        raise UserError(
            f"plan {words[0]}: there is no such command; give overrides to plan a run, or choose "
            "scale or tune."
        )


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
