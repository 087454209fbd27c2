"""A whole training step of each mixer at equal parameters.

    python -m scripts.bench mixers size=s batch_size=256 runtime=production
    python -m scripts.bench mixers size=b batch_size=64 data.height=64 data.width=64 runtime=production

32×32 latents are 256 tokens, 64×64 latents 1,024. Ratios are to attention (`dit`), round by round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.bench.report import gib, table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, times_as_fast
from scripts.bench.workload import Workload, attempt, time_steps
from training.config.compose import CONF
from training.environment import pick_device

ATTENTION = "dit"


@dataclass(frozen=True)
class MixersConfig(BenchConfig):
    """Keys of the comparison."""

    size: str | None = None
    """xs, s, b, l or xl; null: s on a GPU, xs without one."""


def families(size: str) -> list[str]:
    """All families that have the size, attention first."""
    found = sorted(file.stem.rpartition("_")[0] for file in (CONF / "model").glob(f"*_{size}.yaml"))
    if not found:
        raise ValueError(f"size={size}: there is no such size; choose xs, s, b, l or xl.")
    return [ATTENTION, *(name for name in found if name != ATTENTION)]


def main(words: list[str]) -> None:
    cfg, overrides = parse(MixersConfig, "mixers", words, __doc__ or "")
    device = pick_device("auto")
    size = cfg.size or ("s" if device.type == "cuda" else "xs")
    built, failed = {}, []
    for family in families(size):
        own = [word for word in overrides if not word.startswith("model")]
        made = attempt(lambda f=family, own=own: Workload(f, [*own, f"model={f}_{size}"]))
        if isinstance(made, str):
            failed.append({"name": family, "error": made})
        else:
            built[family] = made
    times = time_steps(built, cfg.steps, cfg.repeats)
    base = times[ATTENTION] if ATTENTION in times else next(iter(times.values()))
    entries: list[dict[str, Any]] = []
    for family, workload in built.items():
        spread = Spread.of(times[family])
        entries.append(
            {
                "name": family,
                "parameters": sum(p.numel() for p in workload.model.parameters()),
                "tokens": workload.model.tokens,
                **spread.as_json("step_ms"),
                "samples_per_s": 1e3 * workload.batch_size / spread.median,
                "times_attention": times_as_fast(base, times[family]),
                "mfu": workload.mfu(spread.median / 1e3),
                "memory_reserved_peak": workload.memory_peak,
                "not_on": workload.missing(),
            }
        )
    head = ("mixer", "parameters", "tokens", "ms/step", "range", "samples/s", "×attention", "MFU", "GiB", "not on")
    rows: list[tuple[object, ...]] = [head]
    for e in entries:
        spread = f"{e['step_ms_min']:.2f}–{e['step_ms_max']:.2f}"
        mfu = None if e["mfu"] is None else f"{e['mfu']:.1%}"
        figures = (f"{e['step_ms']:.2f}", spread, f"{e['samples_per_s']:.0f}", f"{e['times_attention']:.2f}", mfu)
        missing = ", ".join(e["not_on"]) or None
        rows.append((e["name"], e["parameters"], e["tokens"], *figures, gib(e["memory_reserved_peak"]), missing))
    rows += [(e["name"], *[None] * 8, e["error"]) for e in failed]
    text = table(rows)
    print(f"\n{text}")
    assert cfg.out is not None
    settings = {"size": size, "overrides": overrides, "steps": cfg.steps}
    write_result(cfg.out, settings | {"mixers": [*entries, *failed]}, device, text)
