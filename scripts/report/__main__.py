"""Makes a report of a run: one HTML page that opens anywhere without a network, and a model card in Markdown.

    python -m scripts.report run_dir=runs/mine
    python -m scripts.report run_dir=runs/mine other=runs/theirs out=mine_and_theirs.html

Writes <run_dir>/report.html and <run_dir>/model_card.md; with `out`, that page and <out>.md beside it. `other` puts a
second run beside the first. Needs matplotlib: pip install 'fastlatent[report]'.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from training.config.compose import from_words, one_sentence


@dataclass(frozen=True)
class ReportConfig:
    """Which run to report on."""

    run_dir: str | None = None
    other: str | None = None
    """A second run folder, shown beside the first."""
    out: str | None = None
    """The page, <name>.html; null: report.html in the run folder."""


def report(cfg: ReportConfig) -> tuple[Path, Path]:
    """Writes page and card, and returns their paths; ValueError for a folder that is no run folder."""
    if cfg.run_dir is None:
        raise ValueError("run_dir is not set; say which run: run_dir=runs/<name>.")
    if cfg.out is not None and not cfg.out.endswith(".html"):
        raise ValueError(f"out={cfg.out} must end with .html.")
    from data.manifest import write_atomically
    from scripts.report.card import card
    from scripts.report.history import read_history
    from scripts.report.page import page

    run = read_history(cfg.run_dir, "run_dir")
    runs = [run] if cfg.other is None else [run, read_history(cfg.other, "other")]
    if runs[-1] is not run and runs[-1].name == run.name:
        runs[-1].name += " (other)"
    html = run.folder / "report.html" if cfg.out is None else Path(cfg.out).expanduser()
    markdown = run.folder / "model_card.md" if cfg.out is None else html.with_suffix(".md")
    texts = {html: page(runs), markdown: card(run)}
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            write_atomically(file, text)
    except OSError as error:
        raise ValueError(f"{html} cannot be written ({error.strerror}); set out=<folder>/<name>.html.") from error
    print(f"{html}\n{markdown}", flush=True)
    return html, markdown


def main() -> None:
    with one_sentence():
        report(from_words(ReportConfig, sys.argv[1:], __doc__ or ""))


if __name__ == "__main__":
    main()
