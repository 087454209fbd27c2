"""Pages and tables: a result replaces "not measured" where it exists; twice is as once."""

import re
import shutil
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from diffusers import AutoencoderKL
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from accel.stack import TECHNIQUES
from common.files import ROOT, read_object, write_json
from common.text import format_table
from models.mixers.attention import Attention
from scripts.bench import TABLES, publish
from scripts.bench.cases import hash_code
from scripts.bench.publish import PLACES, Page, make_tables
from scripts.bench.rows import Result, add_remarks, format_entries

GPU = {
    "hardware": "NVIDIA H100 80GB HBM3",
    "device": "cuda",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"},
    "date": "2026-12-01T10:00:00",
}
CPU = {"hardware": "a CPU, 2 threads", "device": "cpu"}
COMMIT = "0123456789abcdef"


def make_result(benchmark, entry, **run):
    command = f"python -m scripts.bench {benchmark.partition('_')[0]} setting=s256 name={benchmark}"
    environment = {
        "code": "c1",
        "git": {"commit": COMMIT, "uncommitted_changes": False},
        "command": command,
    }
    return {"benchmark": benchmark, "entry": entry, "environment": environment | GPU | run}


def make_rung(name, speed, **more):
    figures = {"name": name, "samples_per_s": 100 * speed, "mfu": 0.25, "warm_up_s": 1.0}
    figures |= {"loss_deviation": 0.0, "n": 5, "not_on": []}
    figures |= dict.fromkeys(("speed", "speed_q1", "speed_q3"), speed)
    figures |= dict.fromkeys(("step_ms", "step_ms_q1", "step_ms_q3"), 9.0 / speed)
    figures |= {"memory_reserved_peak": 3 * 2**30, "baseline_memory_reserved_peak": 4 * 2**30}
    return figures | more


def add_results(root, *results):
    """Publishes results on the pages below `root`."""
    with TemporaryDirectory() as folder:
        for number, result in enumerate(results):
            file = Path(folder) / result["benchmark"] / f"{number}.json"
            file.parent.mkdir(exist_ok=True)
            write_json(file, result)
        publish.publish([Path(folder)], root)


def make_page(benchmark, *entries, **run):
    results = [make_result(benchmark, entry, **run) for entry in entries]
    return Page(benchmark, [Result(made["entry"], made["environment"]) for made in results])


@pytest.fixture
def root(tmp_path):
    """The pages with tables, without results."""
    folder = tmp_path / "root"
    (folder / "docs" / "benchmarks").mkdir(parents=True)
    for place in set(PLACES.values()):
        shutil.copy(ROOT / place, folder / place)
    return folder


@pytest.fixture
def pages(root):
    return root / "docs" / "benchmarks"


def read_all(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_tables_are_those_of_the_pages(tmp_path):
    """Fails where `bench publish` was not run after a result or the template changed."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    before = read_all(tmp_path)
    publish.publish([], tmp_path)
    assert read_all(tmp_path) == before, "run python -m scripts.bench publish"
    assert b"docs/benchmarks/cpu.md#ladder-33m" in before[tmp_path / "README.md"]
    files = (ROOT / "conf/encoder").iterdir()
    assert {file.stem for file in files} == {"local", "pixels", *TABLES["encoders"]}


def test_a_result_replaces_not_measured_where_it_exists_and_twice_is_as_once(
    root, pages, monkeypatch
):
    monkeypatch.setattr(publish, "describe_floor", lambda words, *more: f"{words} {more}")
    publish.publish([], root)
    before = (pages / "README.md").read_text().count("not measured")
    results = [make_result("ladder_s256", make_rung(name, 1.0)) for name in ("+ bf16", "+ tf32")]
    results.append(make_result("mixers_b256", make_rung("mamba", 1.0), words="model=mamba_xs"))
    refusal = {"name": "machine", "reason": "needs another machine"}
    results += [make_result("step", {"name": "x", "error": "e"}), make_result("doctor", refusal)]
    add_results(root, *results)
    once = read_all(root)
    add_results(root, *results)
    publish.publish([], root)
    assert read_all(root) == once

    text = (pages / "h100.md").read_text()
    shown = ["NVIDIA H100 80GB HBM3", "torch 2.11.0", "2026-12-01;", "code 0123456789;"]
    shown += ["n = 5", "25.0%", "3.00", "    python -m scripts.bench ladder setting=s256 name="]
    shown.append("mamba: ['model=mamba_xs'] ('h100', 9.0)")
    assert not [part for part in shown if part not in text]
    figures = read_object(pages / "h100/ladder_s256.json")
    assert [rung["name"] for rung in figures["cases"]] == ["+ tf32", "+ bf16"]  # as planned
    text = (pages / "README.md").read_text()
    links = ["h100.md#mixers-b256", "h100.md#ladder-s256", "h100.md#step"]
    assert re.findall(r"h100\.md#[^)]*", text) == links
    assert text.count("not measured") == before - 3


def test_a_result_keeps_the_figures_that_a_page_prints_and_no_others(tmp_path):
    template = (ROOT / "scripts/bench/results.md.jinja").read_text()
    named = {*re.findall(r"\b(?:entry|best)\.(\w+)", template)} - {"remark"}
    entry = dict.fromkeys(named, "1") | make_rung("a", 1.1, samples=7)
    for benchmark in ("speedrun_digits", "ladder_s256"):
        page = make_page(benchmark, entry)
        publish.write_figures(page, tmp_path)
        (kept,) = publish.read_page(tmp_path / page.file).entries
        columns = {*re.findall(r"{(\w+)", str(TABLES["columns"].get(page.command)))}
        assert named | columns & entry.keys() <= kept.keys()
        assert "samples" not in kept


def test_all_results_together_stay_small():
    contents = [*read_all(ROOT / "docs" / "benchmarks").values()]
    assert sum(content.count(b"\n") for content in contents) <= 6_000
    assert sum(map(len, contents)) <= 600_000


def test_an_older_result_stays_with_its_commit_until_it_is_replaced(root, pages):
    olds = [make_result("ladder_s256", make_rung(name, 1.0)) for name in "ab"]
    add_results(root, *olds)
    newer = {"code": "c2", "git": {"commit": "abcdef0123456", "uncommitted_changes": False}}
    newer = make_result("ladder_s256", make_rung("b", 3.0), **newer, date="2027-01-05T10:00:00")
    failed = make_result("ladder_s256", {"name": "a", "error": "e"}, date="2027-01-04T10:00:00")
    add_results(root, newer, failed)
    add_results(root, *olds)  # an older result replaces nothing, and a failure no figures
    page = publish.read_page(pages / "h100/ladder_s256.json")
    commits = {kept.entry["name"]: kept.environment["git"]["commit"] for kept in page.results}
    assert commits == {"a": COMMIT, "b": "abcdef0123456"}
    assert page.entries[0]["speed"] == 1.0
    assert page.newest["code"] == "c2"
    text = (pages / "h100.md").read_text()
    assert "2026-12-01, 2027-01-05; code abcdef0123;" in text
    assert "a: measured by code 0123456789, 2026-12-01, torch 2.11.0." in text

    other = make_result(
        "ladder_s256", make_rung("d", 1.0), hardware="NVIDIA H100 PCIe", date="2027-01-09T10:00:00"
    )
    add_results(root, other)
    entries = publish.read_page(pages / "h100/ladder_s256.json").entries
    assert [entry["name"] for entry in entries] == ["d"]  # a section is of one machine


def test_a_result_from_a_place_without_git_gets_the_commit_of_its_code(root, pages, monkeypatch):
    state = {"commit": "f" * 40, "uncommitted_changes": True}
    monkeypatch.setattr("scripts.bench.publish.read_git_state", lambda: state)
    ours = make_result("step", {"name": "step"}, git=None, words="", code=hash_code([]))
    add_results(root, ours, make_result("plan", {"name": "eager"}, git=None, words=""))
    plan, step = re.split("^## ", (pages / "h100.md").read_text(), flags=re.MULTILINE)[1:]
    assert "code ffffffffff+;" in step
    assert "code unknown;" in plan


@pytest.mark.parametrize(
    ("model", "card"), [("A100-SXM4-40GB", "a100"), ("GeForce RTX 4090", "4090")]
)
def test_a_card_is_one_word(model, card):
    assert publish.name_card({"device": "cuda", "hardware": f"NVIDIA {model}"}) == card


def test_the_front_says_what_was_measured_and_where():
    assert "make gpu" in make_tables([])["front"]
    steps = [make_rung("0", 1.0, batch_size=4), make_rung("+ bf16", 1.5)]
    steps += [make_rung("+ compiled blocks", 3.0), make_rung("max", 9.0, not_on=["cuda_graph"])]
    ladder = make_page("ladder_33m", *steps, **CPU)
    # tf32 is on neither side of the comparison
    mixers = make_page(
        "mixers_33m", make_rung("ssd_mlp", 0.5, not_on=["tf32"], baseline_not_on=["tf32"]), **CPU
    )
    front = make_tables([ladder, mixers])["front"]
    for part in (
        "| two CPU cores, batch 4 |",
        "compared with uncompiled ones | [×2.00 (2.00–2.00)](docs/benchmarks/cpu.md#ladder",
        "bf16, compared with TF32 | [×1.50 (1.50–1.50)](",
        # a rung that lost what it asked for does not count
        "with a plain PyTorch loop | [×3.00 (3.00–3.00)](",
        "126 M parameters) | [×0.50 (0.50–0.50)](docs/benchmarks/cpu.md#mixers-33m",
        "No GPU has measured these yet",
    ):
        assert part in front

    refused = make_page("ladder_33m", steps[0], {"name": "+ bf16", "reason": "no bf16"}, **CPU)
    assert "bf16" not in make_tables([refused])["front"], "a row that nobody measured"
    on_gpu = make_tables([ladder, make_page("ladder_s256", *steps)])["front"]
    assert "| two CPU cores, batch 4 | GPU, batch 4 |" in on_gpu
    assert "No GPU" not in on_gpu


def test_the_table_of_techniques_has_figures_as_soon_as_a_gpu_measured_one():
    assert "–" not in make_tables([])["techniques"]
    straddling = {"speed_q1": 0.98, "speed_q3": 1.02}
    rungs = [
        make_rung(f"runtime.{key}={value} over bf16", speed, key=key, part="alone", **more)
        for key, value, speed, more in (
            ("tf32", "true", 2.25, {}),
            ("attention", "math", 0.5, {}),
            ("attention", "flash", 1.5, {}),
            ("cuda_graph", "true", 2.0, {"not_on": ["cuda_graph"]}),
            ("fused_adamw", "true", 1.01, straddling),
        )
    ]
    table = make_tables([make_page("techniques_bf16", *rungs)])["techniques"]
    assert "| ×2.25, 75% of the memory |" in table
    assert "| ×1.50, 75% of the memory (flash) |" in table
    assert "| no difference, 75% of the memory |" in table
    assert table.count("| – |") == len(TECHNIQUES) - 3  # what was not on was not measured
    assert "(benchmarks/h100.md#techniques-bf16)" in table


def test_rungs_are_told_from_the_rung_before():
    entries = [make_rung("a", 1.0), {"name": "b", "reason": "no GPU"}]
    entries += [make_rung("c", 2.0, speed_q1=1.9, speed_q3=2.2)]
    entries += [make_rung("d", 2.0, not_on=["tf32"], memory_reserved_peak=None)]
    remarked = add_remarks("ladder", entries)
    assert [entry.get("times_before") for entry in remarked] == [None, None, 2.0, 1.0]
    assert [entry["remark"] for entry in remarked] == ["", "no GPU", "", "not on: tf32"]
    assert remarked[3]["times_before_q1"] == 2.0 / 2.2
    assert remarked[2]["times_before_q1"] == 2.0  # on a GPU, of the steps' times
    line = format_entries("ladder", entries)[0].splitlines()[2]
    assert line.split()[:2] == ["b", "–"]
    assert line.endswith("–  no GPU")
    assert format_entries("step", [{"name": "a", "error": "e", "text": "t"}])[1] == "t"


def test_a_page_without_its_marks_is_told(root):
    (root / "README.md").write_text("# no marks")
    with pytest.raises(ValueError, match=r"README\.md has lost the lines"):
        publish.publish([], root)


def test_tables_align():
    rows = [("name", "ms"), ("a", "1.5"), ("longer", "10.25"), ("none", None)]
    lines = ["name       ms", "a         1.5", "longer  10.25", "none        –"]
    assert format_table(rows).splitlines() == lines


GUIDES = TABLES["guides"]
ROWS_OF_GUIDES = [*chain(*GUIDES["more"].values()), *GUIDES["mistakes"]]
ROWS_OF_GUIDES += [row[side] for row in GUIDES["techniques"] for side in ("speed", "memory")]


def test_every_figure_of_the_guides_has_one_status_and_cases_that_are_measured():
    for row in ROWS_OF_GUIDES:
        here = row.get("here", "")
        for source in () if isinstance(here, str) else here:
            assert source.keys() - {"cpu"} == {"item", "cases", "shows"}, row
            command = f"python -m scripts.bench {TABLES['queue'][source['item']]['words']}"
            assert {*source["cases"].values()} <= {*publish.list_cases(command)}, row


def test_the_page_of_guides_shows_a_figure_and_where_it_was_measured(monkeypatch):
    """A figure of a GPU where there is one, of a CPU only where it answers the promise, and never
    of a case that failed."""
    source = {"item": "counted", "shows": "{peak_change:+.0%}", "cpu": True}
    source["cases"] = {"one": "bf16", "two": "other"}
    row = {"what": "all", "promised": "2 ×", "here": [source]}
    later = {"what": "later", "key": "a.b, c.d", "promised": "3 ×"}
    timed = {"item": "step", "cases": {"": "s"}, "shows": "×{speed:.1f}"}
    rows = [row, later | {"here": "declined: why"}, later, row | {"here": [timed]}]
    monkeypatch.setitem(TABLES, "guides", GUIDES | {"more": {"Memory": rows}})
    failed = {"name": "other", "peak_change": 9.0, "error": "it failed"}
    cpu = make_page("counted_b256", {"name": "bf16", "peak_change": -0.5}, failed, **CPU)
    text = make_tables([cpu, make_page("step_tiny", make_rung("s", 3.0), **CPU)])["more"]
    assert "2 × | one: -50% [cpu-counted-b256] |" in text
    assert "[cpu-counted-b256]: benchmarks/cpu.md#counted-b256" in text
    assert "| later | `a.b`, `c.d` | 3 × | declined: why |" in text
    assert "| later | `a.b`, `c.d` | 3 × | – |" in text
    assert "| all | – | 2 × | – |" in text
    same = make_rung("s", 1.0, speed_q1=0.9, speed_q3=1.1)
    pages = [cpu, make_page("counted", {"name": "bf16", "peak_change": -0.25})]
    text = make_tables([*pages, make_page("step", same)])["more"]
    assert "one: -25% [h100-counted]" in text
    assert "2 × | unsettled: ×1.0 [h100-step]" in text


def test_what_prevents_a_mistake_has_a_test():
    for row in GUIDES["mistakes"]:
        file, name = row["proof"].split("::")
        assert re.search(rf'(def |"){name}[("]', (ROOT / file).read_text())


def test_what_the_guides_page_counts_by_hand_is_so():
    counted = " ".join(str(row.get("here")) for row in ROWS_OF_GUIDES)
    L, s, b, h, a = 32, 1024, 100, 4096, 32
    assert f"{2 * L * s * b * h * (34 + 5 * a * s // h) / 1e12:.2f} TB" in counted
    assert f"{b * s / 1e6:.1f} M tokens" in counted
    planned = (ROOT / "docs/planning.md").read_text()
    assert all(f"| {figure} |" in planned for figure in re.findall(r"([\d.]+) × with", counted))
    dit = publish.read_page(ROOT / "docs/benchmarks/h100/mixers_b256.json").entries[0]
    assert f"beside {dit['flops_a_sample'] / 1e9:.0f} of training" in counted
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        encoder = AutoencoderKL(**TABLES["encoders"]["sd"][1], layers_per_block=2).encoder
        encoder(torch.zeros(1, 3, 256, 256))
    assert f"{counter.get_total_flops() / 1e9:.0f} GFLOP" in counted
    assert f"{4 * sum(p.numel() for p in encoder.parameters()) / 1e6:.0f} MB" in counted
    for layer in (0, 1):
        mixer = Attention(64, 64, (32, 32), window=8, layer=layer)
        mixer.init_weights()
        seen = mixer.windows[:, None] == mixer.windows
        mask = create_block_mask(
            lambda b, h, q, k, seen=seen: seen[q, k], None, None, 1024, 1024, device="cpu"
        )
        assert f"{100 * (1.0 - seen.float().mean().item()):.0f} %" in counted
        assert f"{mask.sparsity():.0f} %" in counted
