"""The report of a run: what it shows, what it says of missing parts, and how it looks in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.report.__main__ import ReportConfig, report
from scripts.report.history import read_history
from scripts.report.page import distances, evaluations, summary
from scripts.report.plots import TRAINING, draw, thinned
from training.config.compose import as_yaml, compose

EVIL = "<script>alert(1)</script>"
PROTOCOL = {
    "count": 1000,
    "reference": {"path": "/somewhere", "sha256": "ab" * 32},
    "features": {"random": {"seed": 0, "floor_fd": 3.25}},
    "solver": "heun",
    "steps": 20,
}
FIGURES = {
    "random": {"fd": 21.25, "kd": 0.021, "kd_std": 0.001, "precision": 0.61, "recall": 0.44, "floor_fd": 3.25},
    "encoder": {"fd": None, "kd": 0.5, "precision": 0.1, "recall": 0.2, "floor_fd": None, "why": "Too few samples."},
}
DEFAULTS = compose([]).source
Plant = Callable[..., Path]


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Plant:
    """Writes a run folder with everything in it; `protocol` changes its protocol."""

    def planted(name: str, **protocol: Any) -> Path:
        folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        config = DEFAULTS | {"run_dir": str(folder), "batch_size": 32, "init_from": EVIL}
        (folder / "config.yaml").write_text(as_yaml(config))
        write(
            folder / "environment.json",
            {
                "versions": {"torch": "2.13.0"},
                "hardware": "a planted card",
                "git": {"commit": "c0ffee", "uncommitted_changes": True},
                "argv": ["train.py", "batch_size=32"],
                "choices": {"model": "mamba_xs", "data": "digits"},
            },
        )
        rows = {"tf32": (True, False, "no GPU here"), "attention": ("auto", "sdpa", "4 calls")}
        ledger = {k: dict(zip(("requested", "active", "evidence"), row, strict=True)) for k, row in rows.items()}
        write(folder / "ledger.json", ledger)
        write(folder / "summary.json", {"loss": 0.125, "samples": 3200, "steps": 100, "train_seconds": 50.5})
        lines = []
        for step in range(10, 101, 10):
            line = {
                "step": step,
                "samples": 32 * step,
                "loss": 12.0 / step,
                "grad_norm": 1.0,
                "skipped": 0,
                "mfu": None,
            }
            line |= {"train_seconds": step / 2, "eval_loss": 1.0, "eval_loss_t0.00_0.25": 0.5, "data_wait": 0.01}
            lines.append(line | ({"fd_random": 900.0 / step} if step % 50 == 0 else {}))
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        for step in range(10, 101, 10):
            file = folder / "samples" / f"step-{step}.png"
            file.parent.mkdir(exist_ok=True)
            Image.new("RGB", (1200 if step == 100 else 40, 20), (step, 0, 0)).save(file)
        spec = {"num_classes": 2, "count": 1617, "class_names": ["cat", EVIL], "fingerprint": "planted-set"}
        checkpoint = folder / "checkpoints" / "step-100"
        write(checkpoint / "state.json", {"step": 100, "spec": spec})
        write(checkpoint / "manifest.json", {"files": {"ema.safetensors": {"sha256": "ef" * 32}}})
        write(folder / "fd_protocol.json", PROTOCOL | protocol)
        weights = {"file": f"/x/{name}", "sha256": name, "kind": "ema", "step": 100}
        evaluation = {"features": FIGURES, "protocol": PROTOCOL | protocol | {"weights": weights}}
        write(folder / "evaluation" / "final.json", evaluation)
        return folder

    return planted


def texts(**words: Any) -> tuple[str, str]:
    """Page and card of a report."""
    html, markdown = report(ReportConfig(**{key: str(value) for key, value in words.items()}))
    return html.read_text(), markdown.read_text()


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def alts(page: str) -> list[str]:
    return re.findall(r'<img src="[^"]+" alt="([^"]*)"', page)


@pytest.fixture(scope="module")
def whole(plant: Plant) -> tuple[str, str]:
    return texts(run_dir=plant("mine"))


def test_the_page_shows_the_whole_run(whole: tuple[str, str]):
    page, _ = whole
    for fact in ("a planted card", "c0ffee with uncommitted changes", "torch 2.13.0", "planted", "0.125", "50.5"):
        assert fact in section(page, "summary"), fact
    shown = section(page, "training")
    assert "training loss from 1.2 to 0.12; held-out loss from 1 to 1" in shown
    assert "t 0.00 to 0.25 from 0.5 to 0.5" in shown
    assert "Skipped steps: 0 throughout." in shown
    assert "GPU memory: not recorded." in shown
    assert [alt.split(":")[0] for alt in alts(section(page, "distance"))] == [
        "Fréchet distance, features random over samples",
        "Fréchet distance, features random over train seconds",
    ]
    for figure in ("21.25", "3.25", "0.021 ± 0.001", "0.61", "0.44", "Too few samples.", "ema step 100", "heun"):
        assert figure in section(page, "evaluations"), figure
    grids = alts(section(page, "samples"))
    assert [re.search(r"step (\d+)", alt)[1] for alt in grids] == ["10", "30", "50", "60", "80", "100"]  # type: ignore[index]
    assert re.findall(r'<tr class="missing"><th scope="row">(\w+)', section(page, "ledger")) == ["tf32"]
    assert "1 of 2 rows" in section(page, "ledger")
    changed = re.findall(r'<th scope="row">([\w.]+)</th><td>', section(page, "configuration"))
    assert changed == ["init_from", "batch_size"]


def test_the_same_plot_is_drawn_the_same(plant: Plant):
    run = read_history(str(plant("mine")), "run_dir")
    assert draw(TRAINING[0], [run]) == draw(TRAINING[0], [run])


def test_a_long_curve_keeps_its_extremes():
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321], points[7] = (54_321.0, 99.0), (7.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= 1500
    assert {points[54_321], points[7]} <= {*kept}
    assert kept == sorted(kept)


def test_nothing_of_a_run_folder_becomes_markup(plant: Plant):
    run = plant("mine")
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + json.dumps({"step": 110, "samples": 3520, f"fd_{EVIL}$\\frac": 1.0}) + "\n")
    page, card = texts(run_dir=run)
    assert "<script" not in page
    assert "&lt;script&gt;" in section(page, "configuration")
    assert "<script" not in card
    assert "&lt;script&gt;" in card


def test_torn_lines_and_numbers_that_are_none_are_said(plant: Plant):
    run = plant("mine")
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 110, "samples": 3520, "loss": NaN, "lr": "x"}\n{"step": 120, "sam')
    page = summary([read_history(str(run), "run_dir")])
    assert "Line 12 of metrics.jsonl is torn, and is left out." in page
    assert "At 1 of 11 logged steps the loss is no finite number." in page


def test_a_summary_that_the_run_has_outrun_is_left_out(plant: Plant):
    run = plant("mine")
    write(run / "summary.json", {"loss": 0.5, "steps": 50})
    page = summary([read_history(str(run), "run_dir")])
    assert "summary.json is of an earlier end of the run" in page
    assert "<td>0.12</td>" in page


def test_missing_parts_are_a_sentence(plant: Plant):
    run = plant("mine")
    for name in ("environment.json", "ledger.json", "summary.json", "fd_protocol.json", "metrics.jsonl"):
        (run / name).unlink()
    for name in ("samples", "checkpoints", "evaluation"):
        shutil.rmtree(run / name)
    page, card = texts(run_dir=run)
    for sentence in (
        "There is no environment.json",
        "no: there is no summary.json",
        "there are no logged steps",
        "no distance was measured",
        "no evaluation",
        "no grids of samples",
        "no ledger.",
    ):
        assert sentence in page, sentence
    assert "The run is not finished." in card
    assert "not evaluated" in card
    assert "holds no checkpoint" in card


def test_a_run_of_an_older_version_has_no_plots_over_seconds(plant: Plant):
    run = plant("mine")
    file = run / "metrics.jsonl"
    file.write_text(re.sub(r'"train_seconds": [\d.]+, ', "", file.read_text()))
    shown = distances([read_history(str(run), "run_dir")])
    assert len(alts(shown)) == 1
    assert "mine is not drawn over seconds" in shown


def test_two_runs_of_one_protocol_stand_side_by_side(plant: Plant, tmp_path: Path):
    """Weights and paths may differ."""
    mine, theirs = plant("mine"), plant("theirs", reference={"path": "/elsewhere", "sha256": "ab" * 32})
    (theirs / "config.yaml").write_text(as_yaml(DEFAULTS | {"batch_size": 48}))
    page, _ = texts(run_dir=mine, other=theirs, out=tmp_path / "both.html")
    assert "mine: training loss" in page
    assert "theirs: training loss" in page
    both = alts(section(page, "distance"))
    assert len(both) == 2
    assert all("mine from" in alt and "theirs from" in alt for alt in both)
    assert section(page, "evaluations").count("<thead>") == 2  # the figures and their protocol
    assert "Another protocol" not in page
    between = section(page, "configuration").partition("What differs between the two")[2]
    assert '<th scope="row">batch_size</th><td>32</td><td>48</td>' in between
    assert "run_dir" not in between.partition("<details>")[0]
    assert (tmp_path / "both.md").is_file()


def test_figures_of_two_protocols_stand_apart(plant: Plant):
    runs = [read_history(str(folder), "run_dir") for folder in (plant("mine"), plant("theirs", steps=50))]
    for shown in (distances(runs), evaluations(runs)):
        assert shown.count("Another protocol") == 1
        assert "they differ in steps (20 or 50)." in shown
        assert not any("mine" in alt and "theirs" in alt for alt in alts(shown))
    assert evaluations(runs).count("<thead>") == 4  # two tables of figures and two of settings


def test_the_model_card(whole: tuple[str, str]):
    _, card = whole
    front = card.split("---\n")[1]
    assert front.startswith("library_name: fastlatent\ntags: [")
    assert "license" not in card
    for fact in (
        "1,617 training samples of 2 classes: cat, &lt;script&gt;",
        "planted-set",
        "| samples seen | 3,200 |",
        "| batch (global) | 32 |",
        "| seconds of training | 50.5 |",
        "weights=ema.safetensors guidance=1.5 'guidance_interval=[0.0,1.0]' solver=heun steps=20",
        "ef" * 32,
        "| 21.25 | 3.25 | 0.021 ± 0.001 |",
        "Protocol: count 1,000",
        "features encoder: no FD. Too few samples.",
        "Requested and not active in training: tf32.",
    ):
        assert fact in card, fact
    assert "/somewhere" not in card, "nobody else has that path"


def test_what_is_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"other=.* is no run folder: it has no config.yaml"):
        read_history(str(tmp_path), "other")
    with pytest.raises(ValueError, match=r"out=page\.md must end with \.html"):
        report(ReportConfig(run_dir=str(tmp_path), out="page.md"))
    with pytest.raises(ValueError, match="run_dir is not set"):
        report(ReportConfig())


def test_a_folder_that_cannot_be_written_is_said(plant: Plant, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(.*\); set out=<folder>/<name>\.html"):
        report(ReportConfig(run_dir=str(plant("mine")), out=str(tmp_path / "file" / "page.html")))


def test_without_matplotlib_one_sentence_says_what_to_install(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    run = plant("mine")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'fastlatent\[report\]'"):
        report(ReportConfig(run_dir=str(run)))


PROBE = """<script>
const errors = [];
onerror = message => errors.push(message);
onload = () => parent.postMessage(JSON.stringify({
  errors, width: document.documentElement.scrollWidth, inner: innerWidth, images: document.images.length,
  broken: [...document.images].filter(i => !i.naturalWidth).length,
  requests: performance.getEntriesByType("resource").filter(e => /^https?:/.test(e.name)).length}), "*");
</script>"""
WRAPPER = """<!doctype html><body><iframe src="probed.html" width="390" height="844"></iframe>
<script>onmessage = event => document.body.textContent = event.data</script>"""


def test_a_browser_shows_it_on_a_telephone(plant: Plant, tmp_path: Path):
    """At 390 pixels: every image is drawn, nothing sticks out, no error, no request."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium or google-chrome here")
    page, _ = texts(run_dir=plant("mine"), other=plant("theirs", steps=50))
    assert not re.search(r'(src|href|action)="(?!data:|#)|url\(|@import', page)
    probed = page.replace("<main>", f"{PROBE}<main>").replace("default-src 'none'", "script-src 'unsafe-inline'")
    (tmp_path / "probed.html").write_text(probed)
    (tmp_path / "wrapper.html").write_text(WRAPPER)
    flags = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", f"--user-data-dir={tmp_path}/u"]
    words = [browser, *flags, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "wrapper.html").as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    found = json.loads(re.search(r"\{.*\}", shown)[0])  # type: ignore[index]
    assert found["inner"] == 390
    assert found["width"] <= 390
    assert found["images"] == len(alts(page))
    assert (found["broken"], found["errors"], found["requests"]) == (0, [], 0)
