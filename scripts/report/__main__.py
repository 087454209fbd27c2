"""Makes a report of a run: an HTML page that needs no network, and a model card in Markdown.

    python -m scripts.report run_dir=runs/mine
    python -m scripts.report run_dir=runs/mine other=runs/theirs out=mine_and_theirs.html

Writes <run_dir>/report.html and <run_dir>/model_card.md, or <out>.html and <out>.md. `other` adds a
second run and lists the differences: configuration, ledger, versions, speed, loss. Needs
matplotlib: pip install 'fastlatent[report]'.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.config.compose import parse_words, refuse_missing, report_user_errors
from common.errors import UserError


@dataclass(frozen=True)
class ReportConfig:
    """Keys of the command: the run, a second run to compare it with, and where to write the
    report."""

    run_dir: str | None = None
    other: str | None = None
    out: str | None = None


def report(cfg: ReportConfig) -> tuple[Path, Path]:
    """Writes the HTML page and the model card, and returns the paths of both. Raises ValueError if
    a folder is no run folder."""
    if cfg.run_dir is None:
        raise UserError("run_dir is not set; say which run: run_dir=runs/<name>.")
    paths = {"run_dir": cfg.run_dir, "other": cfg.other}
    for key, path in paths.items():
        refuse_missing(key, path, "name the run_dir of a run", "config.yaml")
    if find_spec("matplotlib") is None:
        raise UserError(
            "the report draws with matplotlib, which is missing: pip install 'fastlatent[report]'."
        )
    from common.files import write_atomically
    from scripts.report.history import History
    from scripts.report.pages import render_card, render_page

    folders = [Path(path).expanduser() for path in paths.values() if path]
    alike = len({folder.resolve().name for folder in folders}) < len(folders)
    runs = [History(folder, str(folder) if alike else "") for folder in folders]
    if cfg.out:
        html = Path(f"{cfg.out.removesuffix('.html')}.html").expanduser()
        markdown = html.with_suffix(".md")
    else:
        html = runs[0].folder / "report.html"
        markdown = runs[0].folder / "model_card.md"
    texts = {html: render_page(runs), markdown: render_card(runs[0])}
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            # Escape halves of surrogate pairs, which a JSON file may hold and which UTF-8 cannot
            # encode.
            write_atomically(file, text.encode(errors="backslashreplace").decode())
    except OSError as error:
        raise UserError(
            f"{html} cannot be written ({error.strerror}); set out=<folder>/<name>.html."
        ) from error
    print(f"{html}\n{markdown}", flush=True)
    return html, markdown


if __name__ == "__main__":
    with report_user_errors():
        report(parse_words(ReportConfig, sys.argv[1:], __doc__ or ""))
