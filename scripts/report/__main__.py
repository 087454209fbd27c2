"""Makes a report of a run: an HTML page that needs no network, and a model card in Markdown.

    python -m scripts.report run_dir=runs/mine
    python -m scripts.report run_dir=runs/mine out=reports/mine.html

Writes <run_dir>/report.html and <run_dir>/model_card.md, or <out>.html and <out>.md. Needs
matplotlib: pip install 'fastlatent[report]'. Weights & Biases and TensorBoard compare runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.config.paths import refuse_missing
from common.errors import UserError
from scripts.commands import run_command


@dataclass(frozen=True)
class ReportConfig:
    """Keys of the command: the run, and where to write the report."""

    run_dir: str | None = None
    """Folder of the run."""
    out: str | None = None
    """The HTML page, and beside it the card; null: report.html and model_card.md in the folder."""


def report(cfg: ReportConfig) -> tuple[Path, Path]:
    """Writes the HTML page and the model card, and returns the paths of both. Raises UserError if
    `run_dir` is no run folder."""
    if cfg.run_dir is None:
        raise UserError("run_dir is not set; say which run: run_dir=runs/<name>.")
    refuse_missing("run_dir", cfg.run_dir, "name the run_dir of a run", "config.yaml")
    if find_spec("matplotlib") is None:
        raise UserError(
            "the report draws with matplotlib, which is missing: pip install 'fastlatent[report]'."
        )
    from common.files import write_atomically
    from scripts.report.history import History
    from scripts.report.pages import render_card, render_page

    run = History(Path(cfg.run_dir).expanduser())
    if cfg.out:
        html = Path(f"{cfg.out.removesuffix('.html')}.html").expanduser()
        markdown = html.with_suffix(".md")
    else:
        html = run.folder / "report.html"
        markdown = run.folder / "model_card.md"
    texts = {html: render_page(run), markdown: render_card(run)}
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
    run_command(report, ReportConfig, __doc__)
