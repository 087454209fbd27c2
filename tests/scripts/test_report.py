"""The report of a run: what it shows, what it says of missing parts, and how it looks in a
browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from common.files import hash_file
from scripts.report import history
from scripts.report.__main__ import ReportConfig, report
from scripts.report.history import History
from scripts.report.pages import TRAINING, draw_plots, list_distance_plots, render_card, render_page
from training.config.compose import compose, to_yaml
from training.weights.pretrained import read_tensors

EVIL = "<script>alert(1)</script>"
PROTOCOL = {
    **{
        "count": 1000,
        "solver": "heun",
        "steps": 20,
        "reference": {"name": "/somewhere", "sha256": "ab" * 32},
    },
    "features": {"random": {"seed": 0}},
    "floors": {"random": {"floor_fd": 3.25}},
}
FIGURES = {
    "random": {
        "fd": 21.25,
        "kd": 0.021,
        "kd_std": 0.001,
        "precision": 0.61,
        "recall": 0.44,
        "floor_fd": 3.25,
    },
    "encoder": {
        "fd": None,
        "kd": 0.5,
        "precision": 0.1,
        "recall": 0.2,
        "floor_fd": None,
        "why": "Too few samples.",
    },
}
DEFAULTS = compose([]).source
Plant = Callable[..., Path]


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Writes a run folder with everything in it; `protocol` changes its protocol."""

    def planted(name: str, **protocol: Any) -> Path:
        folder = tmp_path / name
        (folder / "samples").mkdir(parents=True)
        (folder / "config.yaml").write_text(
            to_yaml(DEFAULTS | {"run_dir": "/x", "batch_size": 32, "init_from": EVIL})
        )
        environment = {
            "versions": {"torch": "2.13.0"},
            "hardware": "a planted card",
            "argv": ["train.py"],
        }
        environment |= {
            "git": {"commit": "c0ffee", "uncommitted_changes": True},
            "choices": {"model": "mamba_xs"},
        }
        write(folder / "environment.json", environment)
        ledger = {"tf32": (True, False, "no GPU here"), "attention": ("auto", "sdpa", "4 calls")}
        columns = ("requested", "active", "evidence")
        write(
            folder / "ledger.json",
            {k: dict(zip(columns, row, strict=True)) for k, row in ledger.items()},
        )
        write(
            folder / "summary.json",
            {"loss": 0.125, "steps": 100, "memory_reserved_peak": 2**31, "run_dir": "/x"},
        )
        lines = []
        for step in range(10, 101, 10):
            line = {
                "step": step,
                "samples": 32 * step,
                "loss": 12.0 / step,
                "grad_norm": 1.0,
                "skipped": 0,
            }
            line |= {
                "mfu": None,
                "train_seconds": step / 2,
                "eval_loss": 1.0,
                "eval_loss_t0.00_0.25": 0.5,
            }
            lines.append(
                line | ({"fd_random": 900.0 / step, "distances_s": 3.0} if step % 50 == 0 else {})
            )
            Image.new("RGB", (1200 if step == 100 else 40, 20)).save(
                folder / "samples" / f"step-{step}.png"
            )
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        spec = {
            "num_classes": 2,
            "count": 1617,
            "class_names": ["cat", EVIL],
            "fingerprint": "planted-set",
        }
        spec |= {"channels": 4, "height": 16, "width": 16, "encoder": {}}
        checkpoint = folder / "checkpoints/step-100"
        write(checkpoint / "state.json", {"step": 100, "spec": spec})
        save_file({"w": torch.zeros(30, 50)}, checkpoint / "ema.safetensors")
        write(folder / "fd_protocol.json", PROTOCOL | {"weights": "ema"} | protocol)
        weights = {"weights": {"file": f"/x/{name}", "sha256": name, "kind": "ema", "step": 100}}
        write(
            folder / "evaluation/final.json",
            {"features": FIGURES, "protocol": PROTOCOL | protocol | weights},
        )
        return folder

    return planted


def texts(**words: Any) -> tuple[str, str]:
    """Page and card of a report."""
    html, markdown = report(ReportConfig(**{key: str(value) for key, value in words.items()}))
    return html.read_text(), markdown.read_text()


@pytest.mark.fault(
    "a report of a run that removes its checkpoint meanwhile", "the next one is read"
)
def test_a_run_that_saves_while_it_is_reported(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    folder = plant("live")
    checkpoint = folder / "checkpoints/step-100"

    def removed(file: Path) -> dict[str, torch.Tensor]:
        if checkpoint.exists():
            checkpoint.rename(checkpoint.with_name("step-110"))
        return read_tensors(file)

    monkeypatch.setattr(history, "read_tensors", removed)
    assert "1,500 parameters" in texts(run_dir=folder)[1]


def test_a_checkpoint_without_its_weights_is_one_sentence(plant: Plant):
    folder = plant("damaged")
    (folder / "checkpoints/step-100/ema.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"step-100/ema.safetensors cannot be read as safetensors \(No such file"
    ):
        texts(run_dir=folder)


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def alts(page: str) -> list[str]:
    return re.findall(r'<img src="[^"]+" alt="([^"]*)"', page)


def test_page_and_card_show_the_whole_run(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page, card = texts(run_dir=plant("mine"))
    for fact in (
        "a planted card",
        "c0ffee with uncommitted changes",
        "torch 2.13.0",
        "0.125",
        "2.00 GiB",
    ):
        assert fact in section(page, "summary"), fact
    shown = section(page, "training")
    assert "training loss from 1.2 to 0.12; held-out loss from 1 to 1" in shown
    assert "t 0.00 to 0.25 from 0.5 to 0.5" in shown
    assert (
        "GPU memory over samples: not recorded. Skipped steps over samples: 0 throughout." in shown
    )
    both = [alt.split(":")[0] for alt in alts(section(page, "distance"))]
    assert both == [
        f"Fréchet distance, features random over {over}" for over in ("samples", "train seconds")
    ]
    for figure in (
        "21.25",
        "3.25",
        "0.021",
        "0.61",
        "0.44",
        "Too few samples.",
        "ema step 100",
        "heun",
    ):
        assert figure in section(page, "evaluations"), figure
    grids = alts(section(page, "samples"))
    assert [re.search(r"step (\d+)", alt)[1] for alt in grids] == [
        "10",
        "30",
        "50",
        "60",
        "80",
        "100",
    ]  # type: ignore[index]
    assert re.findall(r'<tr class=missing><th scope="row">(\w+)', section(page, "ledger")) == [
        "tf32"
    ]
    changed = re.findall(r'<th scope="row">([\w.]+)</th><td>', section(page, "configuration"))
    assert changed == ["init_from", "batch_size"]

    assert card.split("---\n")[1].startswith("library_name: fastlatent\ntags: [")
    for fact in (
        "1,500 parameters",
        "1,617 training samples of 2 classes: cat, &lt;script&gt;",
        "| batch (global) | 32 |",
        "weights=ema.safetensors guidance=1.5 'guidance_interval=[0.0, 1.0]' solver=heun steps=20",
        hash_file(Path("mine/checkpoints/step-100/ema.safetensors")),
        "| 21.25 | 3.25 | 0.021 | 0.001 |",
        "Protocol: count 1,000",
        "| fd\\_random | 3,200 | 9 |",
        "Requested and not active in training: tf32.",
    ):
        assert fact in card, fact
    assert "/somewhere" not in card, "nobody else has that path"
    assert "<script" not in page + card
    assert "&lt;script&gt;" in section(page, "configuration")


def test_the_card_of_an_exported_folder_names_no_file_that_is_not_there(plant: Plant):
    run = History(plant("mine"))
    told = (
        render_card(run, how="open it in diffusers")
        .partition("## How to sample\n\n")[2]
        .partition("\n## ")[0]
    )
    weights = "The weights are of step 100; sha256 of that checkpoint's `ema.safetensors`: "
    weights += f"{hash_file(run.folder / 'checkpoints/step-100/ema.safetensors')}.\n"
    assert told == f"open it in diffusers\n\n{weights}"
    repeats = "how many of the training images the model repeats"
    assert repeats in render_card(run)
    result = run.folder / "evaluation/final.json"
    found = json.loads(result.read_text())
    found["features"]["encoder"]["copied"] = 0.05
    write(result, found)
    assert repeats not in render_card(History(run.folder))


def test_plots_show_the_floor_come_out_the_same_and_stay_small(plant: Plant):
    run = History(plant("mine"))
    plots = list_distance_plots([run])
    assert draw_plots(plots, [run]) == draw_plots(plots, [run])
    assert draw_plots(plots[:1], [run]) != draw_plots([plots[0]._replace(floor=None)], [run])
    run.lines = [{"samples": i, "loss": 2.0 + math.sin(1.7 * i)} for i in range(20_000)]
    assert len(draw_plots(TRAINING[:1], [run])[0][1]) < 200_000


def test_torn_lines_and_numbers_that_are_none_are_said(plant: Plant):
    run = plant("mine")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "samples": 3520, "loss": NaN}\n{"step": 120, "sam')
    page, _ = texts(run_dir=run)
    assert "Lines of metrics.jsonl that cannot be read, and are left out: 1." in page
    assert "At 1 of 11 logged steps the loss is no finite number." in page
    assert "training loss from 1.2 to 0.12" in page
    assert "summary.json is of an earlier end of the run" in page


def test_missing_parts_are_a_sentence(plant: Plant):
    run = plant("mine")
    for name in (
        "environment.json",
        "ledger.json",
        "summary.json",
        "fd_protocol.json",
        "metrics.jsonl",
    ):
        (run / name).unlink()
    for name in ("samples", "checkpoints", "evaluation"):
        shutil.rmtree(run / name)
    page, card = texts(run_dir=run)
    said = (
        "no environment.json,no summary.json,no logged step,no distance,no evaluation,no "
        "grids,no ledger."
    )
    for sentence in said.split(","):
        assert sentence in page, sentence
    for sentence in ("The run is not finished.", "not evaluated", "holds no checkpoint"):
        assert sentence in card, sentence


def test_two_runs_of_one_protocol_stand_side_by_side(plant: Plant, tmp_path: Path):
    """Weights, floors and the reference's place may differ."""
    mine = plant("mine")
    theirs = plant("theirs", reference={"name": "/elsewhere", "sha256": "ab" * 32})
    (theirs / "config.yaml").write_text(to_yaml(DEFAULTS | {"batch_size": 48}))
    write(theirs / "fd_protocol.json", PROTOCOL | {"floors": {"random": {"floor_fd": 3.26}}})
    for name, changes in (
        ("environment.json", {"versions": {"torch": "2.14.0"}}),
        ("ledger.json", {"tf32": {"requested": True, "active": True, "evidence": "seen"}}),
        ("summary.json", {"loss": 0.0625}),
    ):
        write(theirs / name, json.loads((theirs / name).read_text()) | changes)
    page, _ = texts(run_dir=mine, other=theirs, out=tmp_path / "both.html")
    both = alts(section(page, "distance"))
    assert ["mine from" in alt and "theirs from" in alt for alt in both] == [True, True]
    assert section(page, "evaluations").count("<thead>") == 2  # the figures and their protocol
    assert "Another protocol" not in page
    between = section(page, "configuration").partition("What differs between the two")[2]
    assert '<th scope="row">batch_size</th><td>32</td><td>48</td>' in between
    assert "run_dir" not in between
    for row in (
        '<th scope="row">torch</th><td>2.13.0</td><td>2.14.0</td>',
        '<th scope="row">tf32</th><td>on → off</td><td>on → on</td>',
        '<th scope="row">loss</th><td>0.125</td><td>0.0625</td><td>×0.500</td>',
    ):
        assert row in between
    assert "attention" not in between


def test_figures_of_two_protocols_stand_apart(plant: Plant):
    html = render_page([History(plant("mine")), History(plant("theirs", steps=50))])
    for name in ("distance", "evaluations"):
        shown = section(html, name)
        said = "Another protocol, not to be compared with the first: steps (20 or 50)."
        assert shown.count(said) == 1
        assert not any("mine" in alt and "theirs" in alt for alt in alts(shown))
    # two tables of figures and two of settings
    assert section(html, "evaluations").count("<thead>") == 4


def test_what_cannot_be_is_refused_in_a_sentence(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"other=.* has no config.yaml; name the run_dir"):
        report(ReportConfig(run_dir=str(plant("whole")), other=str(tmp_path)))
    with pytest.raises(ValueError, match=r"is no run folder: it has no config\.yaml"):
        History(tmp_path)
    with pytest.raises(ValueError, match="run_dir is not set"):
        report(ReportConfig())
    run = str(plant("mine"))
    with pytest.raises(
        ValueError, match=r"cannot be written \(.*\); set out=<folder>/<name>\.html"
    ):
        report(ReportConfig(run_dir=run, out=f"{run}/config.yaml/page.html"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'fastlatent\[report\]'"):
        report(ReportConfig(run_dir=run))


PROBE = """<script>
const errors = [];
onerror = message => errors.push(message);
onload = () => parent.postMessage(JSON.stringify({
  errors, width: document.documentElement.scrollWidth, inner: innerWidth,
  images: document.images.length,
  broken: [...document.images].filter(i => !i.naturalWidth).length,
  requests: performance.getEntriesByType("resource")
    .filter(e => /^https?:/.test(e.name)).length}), "*");
</script>"""
WRAPPER = """<!doctype html><body><iframe src="probed.html" width="390" height="844"></iframe>
<script>onmessage = event => document.body.textContent = event.data</script>"""


def test_a_browser_shows_it_on_a_telephone(plant: Plant, tmp_path: Path):
    """At 390 pixels: every image is drawn, nothing sticks out, no error, no request."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium or google-chrome here")
    other = plant("other/mine", steps=50)
    page, _ = texts(run_dir=plant("mine"), other=other)
    assert f"{other}: training loss" in page, "two runs of one name are told by their folders"
    assert not re.search(r'(src|href|action)="(?!data:|#)|url\(|@import', page)
    probed = page.replace("<main>", f"{PROBE}<main>").replace(
        "default-src 'none'", "script-src 'unsafe-inline'"
    )
    (tmp_path / "probed.html").write_text(probed)
    (tmp_path / "wrapper.html").write_text(WRAPPER)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/u",
    ]
    words = [
        browser,
        *flags,
        "--virtual-time-budget=5000",
        "--dump-dom",
        (tmp_path / "wrapper.html").as_uri(),
    ]
    shown = subprocess.run(words, capture_output=True, text=True).stdout
    found = json.loads(re.search(r"\{.*\}", shown)[0])  # type: ignore[index]
    assert found["width"] <= found["inner"] == 390
    assert found["images"] == len(alts(page))
    assert (found["broken"], found["errors"], found["requests"]) == (0, [], 0)
