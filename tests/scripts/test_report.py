"""The report of a run: its facts, sentences for missing parts, and its page in a browser."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from common.config.compose import compose, to_yaml
from common.files import hash_file, read_object, write_json
from scripts.report import history
from scripts.report.__main__ import ReportConfig, report
from scripts.report.history import History
from scripts.report.pages import TRAINING_PLOTS, draw_plots, list_distance_plots, render_card
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_json, save_files
from training.weights.pretrained import read_tensors

EVIL = "<script>alert(1)</script>"
FILES = {
    "environment.json": """{
        "versions": {"torch": "2.13.0"}, "hardware": "a planted card", "argv": ["train.py"],
        "git": {"commit": "c0ffee", "uncommitted_changes": true}, "choices": {"model": "mamba_xs"}
    }""",
    "ledger.json": """{
        "tf32": {"requested": true, "active": false, "evidence": "no GPU here"},
        "attention": {"requested": "auto", "active": "sdpa", "evidence": "4 calls"}
    }""",
    "summary.json": """{
        "loss": 0.125, "steps": 100, "memory_reserved_peak": 2147483648, "run_dir": "/x"
    }""",
    "checkpoints/step-100/state.json": """{"step": 100, "spec": {
        "num_classes": 2, "count": 1617, "class_names": ["cat", "<script>alert(1)</script>"],
        "fingerprint": "planted-set", "channels": 4, "height": 16, "width": 16, "encoder": {}
    }}""",
    "fd_protocol.json": """{
        "count": 1000, "solver": "heun", "steps": 20, "weights": "ema",
        "reference": {"name": "/somewhere", "sha256": "abab"},
        "features": {"random": {"seed": 0}}, "floors": {"random": {"floor_fd": 3.25}}
    }""",
    "evaluation/final.json": """{"features": {
        "random": {
            "fd": 21.25, "kd": 0.021, "kd_std": 0.001, "precision": 0.61, "recall": 0.44,
            "floor_fd": 3.25
        },
        "encoder": {
            "fd": null, "kd": 0.5, "precision": 0.1, "recall": 0.2, "floor_fd": null,
            "why": "Too few samples."
        }
    }}""",
}
"""Files of a run, except its configuration, weights, metrics and grids."""
DEFAULTS = compose([]).source


def plant_metrics(folder):
    """Ten logged steps, each with a grid; two of them with a distance."""
    (folder / "samples").mkdir()
    lines = []
    for step in range(10, 101, 10):
        line = {"step": step, "samples": 32 * step, "loss": 12.0 / step, "train_seconds": step / 2}
        line |= {"skipped": 0, "eval_loss": 1.0, "eval_loss_t0.00_0.25": 0.5}
        if step % 50 == 0:
            line |= {"fd_random": 900.0 / step, "distances_s": 3.0}
        lines.append(json.dumps(line) + "\n")
        grid = Image.new("RGB", (1200 if step == 100 else 40, 20))
        grid.save(folder / "samples" / f"step-{step}.png")
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture
def folder(tmp_path):
    """A run folder with everything in it."""
    folder = tmp_path / "mine"
    for file, content in FILES.items():
        save_files(folder, file, content=content.encode())
    weights = {"file": "/x/mine", "sha256": "mine", "kind": "ema", "step": 100}
    measured = read_object(folder / "fd_protocol.json") | {"weights": weights}
    edit_json(folder / "evaluation/final.json", {"protocol": measured})
    save_file({"w": torch.zeros(30, 50)}, folder / "checkpoints/step-100/ema.safetensors")
    changes = {"run_dir": "/x", "batch_size": 32, "init_from": EVIL}
    (folder / "config.yaml").write_text(to_yaml(DEFAULTS | changes))
    plant_metrics(folder)
    return folder


def read_report(**words):
    """Page and card of a report."""
    html, markdown = report(ReportConfig(**{key: str(value) for key, value in words.items()}))
    return html.read_text(), markdown.read_text()


@pytest.mark.fault(
    "a report of a run that removes its checkpoint meanwhile", "the next one is read"
)
def test_a_run_that_saves_while_it_is_reported(folder, monkeypatch):
    checkpoint = folder / "checkpoints/step-100"

    def read_while_saving(file):
        if checkpoint.exists():
            checkpoint.rename(checkpoint.with_name("step-110"))
        return read_tensors(file)

    monkeypatch.setattr(history, "read_tensors", read_while_saving)
    assert "1,500 parameters" in render_card(History(folder))


def test_a_checkpoint_without_its_weights_is_one_sentence(folder):
    (folder / "checkpoints/step-100/ema.safetensors").unlink()
    with expect_refusal(r"step-100/ema.safetensors cannot be read as safetensors \(No such file"):
        read_report(run_dir=folder)


def cut_section(page, name):
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def find_alts(page):
    return re.findall(r'<img src="[^"]+" alt="([^"]*)"', page)


SECTIONS = {
    "summary": """a planted card
c0ffee with uncommitted changes
torch 2.13.0
0.125
2.00 GiB""",
    "training": """training loss from 1.2 to 0.12; held-out loss from 1 to 1
t 0.00 to 0.25 from 0.5 to 0.5
GPU memory over samples: not recorded. Skipped steps over samples: 0 throughout.""",
    "evaluations": """21.25
3.25
0.021
0.61
0.44
Too few samples.
ema step 100
heun""",
}
"""Section of the page -> facts that it shows, one a line."""
CARD = """1,500 parameters
1,617 training samples of 2 classes: cat, &lt;script&gt;
| batch (global) | 32 |
    python -m scripts.sample weights=checkpoints/step-100/ema.safetensors guidance=1.5
guidance=1.5 'guidance_interval=[0.0, 1.0]' solver=heun steps=20
| 21.25 | 3.25 | 0.021 | 0.001 |
Protocol: count 1,000
| fd\\_random | 3,200 | 9 |
Requested and not active in training: tf32."""


def test_page_and_card_show_the_whole_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, card = read_report(run_dir=folder)
    for name, facts in SECTIONS.items():
        section = cut_section(page, name)
        for fact in facts.splitlines():
            assert fact in section, fact
    distances = [alt.split(":")[0] for alt in find_alts(cut_section(page, "distance"))]
    assert distances == [
        f"Fréchet distance, features random over {x}" for x in ("samples", "train seconds")
    ]
    steps = re.findall(r'alt="[^"]*step (\d+)', cut_section(page, "samples"))
    assert steps == ["10", "30", "50", "60", "80", "100"]
    missing = re.findall(r'<tr class=missing><th scope="row">(\w+)', cut_section(page, "ledger"))
    assert missing == ["tf32"]
    changed = re.findall(r'<th scope="row">([\w.]+)</th><td>', cut_section(page, "configuration"))
    assert changed == ["init_from", "batch_size"]

    assert card.split("---\n")[1].startswith("library_name: fastlatent\ntags: [")
    for fact in (*CARD.splitlines(), hash_file(folder / "checkpoints/step-100/ema.safetensors")):
        assert fact in card, fact
    assert "/somewhere" not in card, "nobody else has that path"
    assert "<script" not in page + card
    assert "&lt;script&gt;" in cut_section(page, "configuration")


def test_the_card_of_an_exported_folder_names_no_file_that_is_not_there(folder):
    card = render_card(History(folder), code="open it in diffusers")
    sha256 = hash_file(folder / "checkpoints/step-100/ema.safetensors")
    assert card.partition("## How to sample\n\n")[2].startswith(
        "```python\nopen it in diffusers\n```\n\n"
        "The weights are of step 100; sha256 of that checkpoint's "
        f"`ema.safetensors`: {sha256}.\n\n## "
    )
    # unless an evaluation counted copies, the card says that nobody has
    sentence = "how many of the training images the model repeats"
    assert sentence in card
    edit_json(folder / "evaluation/final.json", {"features": {"encoder": {"copied": 0.05}}})
    assert sentence not in render_card(History(folder))


def test_plots_show_the_floor_come_out_the_same_and_stay_small(folder):
    run = History(folder)
    plots = list_distance_plots(run)[:1]
    drawn = draw_plots(plots, run)
    assert draw_plots(plots, run) == drawn
    assert draw_plots([plots[0]._replace(floor=None)], run) != drawn
    run.lines = [{"samples": i, "loss": i % 7} for i in range(20_000)]
    assert len(draw_plots(TRAINING_PLOTS[:1], run)[0][1]) < 200_000


TORN = """Lines of metrics.jsonl that cannot be read, and are left out: 1.
At 1 of 11 logged steps the loss is no finite number.
training loss from 1.2 to 0.12
summary.json is of an earlier end of the run"""


def test_torn_lines_and_losses_that_are_not_finite_are_said(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "samples": 3520, "loss": null}\n{"step": 120, "sam')
    page, _ = read_report(run_dir=folder)
    for sentence in TORN.splitlines():
        assert sentence in page, sentence


MISSING = """no environment.json
no summary.json
no logged step
No distance
No evaluation
No grids
No ledger."""


def test_missing_parts_are_a_sentence(folder):
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "config.yaml":
            path.unlink()
    page, card = read_report(run_dir=folder)
    for sentence in MISSING.splitlines():
        assert sentence in page, sentence
    assert "holds no checkpoint" in card


def test_evaluations_by_two_protocols_stand_apart(folder):
    again = read_object(folder / "evaluation/final.json")
    again["protocol"]["steps"] = 50
    write_json(folder / "evaluation/later.json", again)
    page, card = read_report(run_dir=folder)
    tables = cut_section(page, "evaluations").split("<summary>Protocol</summary>")
    steps = ["<td>" + n + "</td>" for n in ("20", "50")]
    for table, file in zip(tables, ("final.json", "later.json"), strict=False):
        assert file in table
    for table, own, other in zip(tables[1:], steps, steps[::-1], strict=True):
        assert own in table
        assert other not in table
    assert card.count("Protocol: count 1,000") == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({}, "run_dir is not set"),
        ({"run_dir": "{tmp_path}"}, "run_dir=.* has no config.yaml; name the run_dir of a run"),
        ({"run_dir": "{run}", "out": "{run}/config.yaml/page.html"}, "cannot be written"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, folder, tmp_path):
    values = {key: value.format(run=folder, tmp_path=tmp_path) for key, value in words.items()}
    with expect_refusal(sentence):
        report(ReportConfig(**values))


def test_a_report_without_matplotlib_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with expect_refusal(r"pip install 'fastlatent\[report\]'"):
        report(ReportConfig(run_dir=str(folder)))


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


def test_a_browser_shows_it_on_a_telephone(folder, tmp_path):
    """At 390 pixels: every image is drawn, nothing sticks out, no error, no request."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium or google-chrome here")
    page, _ = read_report(run_dir=folder)
    assert not re.search(r'(src|href|action)="(?!data:|#)|url\(|@import', page)
    probed = page.replace("<main>", f"{PROBE}<main>")
    probed = probed.replace("default-src 'none'", "script-src 'unsafe-inline'")
    (tmp_path / "probed.html").write_text(probed)
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER)
    command = [browser, "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}/u", "--virtual-time-budget=5000", "--dump-dom"]
    dumped = subprocess.run([*command, wrapper.as_uri()], capture_output=True, text=True).stdout
    shown = json.loads(dumped[dumped.index("{") : dumped.rindex("}") + 1])
    assert shown["width"] <= shown["inner"] == 390
    assert shown["images"] == len(find_alts(page))
    assert (shown["broken"], shown["errors"], shown["requests"]) == (0, [], 0)
