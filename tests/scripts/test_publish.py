"""Pages and tables: a result replaces "not measured" where it exists; twice is as once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention.flex_attention import create_block_mask

from accel.stack import TECHNIQUES
from common.files import ROOT
from models.mixers.attention import Attention
from scripts.bench import TABLES
from scripts.bench import publish as publisher
from scripts.bench.cases import plan_job
from scripts.bench.publish import (
    GUIDES,
    PLACES,
    Page,
    Result,
    add_remarks,
    format_entries,
    make_tables,
    name_card,
    publish,
    rate,
    read_page,
)
from scripts.bench.runner import hash_code
from scripts.commands import format_table, replace_between

VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"}
GPU = {
    "hardware": "NVIDIA H100 80GB HBM3",
    "device": "cuda",
    "versions": VERSIONS,
    "date": "2026-12-01T10:00:00",
}
GIT = {"commit": "0123456789abcdef", "uncommitted_changes": False}


def result(benchmark: str, entry: dict[str, Any], order: int = 0, **run: Any) -> dict[str, Any]:
    command = f"python -m scripts.bench {benchmark.partition('_')[0]} setting=s256 name={benchmark}"
    environment = {"code": "c1", "git": GIT, "config": [], "command": command} | GPU | run
    return {
        "benchmark": benchmark,
        "order": order,
        "seconds": 1.0,
        "entry": entry,
        "environment": environment,
    }


def rung(name: str, speed: float, **more: Any) -> dict[str, Any]:
    ends = {
        f"{key}{end}": value
        for key, value in (("step_ms", 9.0), ("speed", speed))
        for end in ("", "_q1", "_q3")
    }
    memory = {"memory_reserved_peak": 3 * 2**30, "baseline_memory_reserved_peak": 4 * 2**30}
    figures = {
        "samples_per_s": 100 * speed,
        "mfu": 0.25,
        "warm_up_s": 1.0,
        "loss_deviation": 0.0,
        "n": 5,
        "not_on": [],
    }
    return {"name": name} | ends | memory | figures | more


def folder_of(path: Path, *results: dict[str, Any]) -> Path:
    for i, one in enumerate(results):
        file = path / one["benchmark"] / f"{i}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(one))
    return path


def page(name: str, *entries: dict[str, Any], **run: Any) -> Page:
    return Page(
        name, [Result(entry, result(name, entry, **run)["environment"]) for entry in entries]
    )


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The pages with tables, and no results."""
    root = tmp_path / "root"
    (root / "docs" / "benchmarks").mkdir(parents=True)
    for place in set(PLACES.values()):
        shutil.copy(ROOT / place, root / place)
    return root


def files(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()
    }


def test_the_tables_are_those_of_the_pages(tmp_path):
    """Fails where `bench publish` was not run after a result or the template changed."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "README.md", root)
    before = files(root)
    publish([], root)
    assert files(root) == before, "run python -m scripts.bench publish"
    assert b"docs/benchmarks/cpu.md#ladder-33m-2026-11" in before["README.md"]


def test_twice_is_the_same_as_once(tmp_path, docs):
    rows = [
        result("ladder_s256", rung(name, speed), i)
        for i, (name, speed) in enumerate((("b", 1.0), ("a", 2.0)))
    ]
    measured = folder_of(tmp_path / "out", *reversed(rows))
    publish([measured], docs)
    once = files(docs)
    publish([measured, measured], docs)
    publish([], docs)
    assert files(docs) == once
    text = once["docs/benchmarks/h100.md"].decode()
    for part in (
        "NVIDIA H100 80GB HBM3",
        "torch 2.11.0",
        "2026-12-01;",
        "code 0123456789;",
        "n = 5",
        "25.0%",
        "3.00",
    ):
        assert part in text
    assert "    python -m scripts.bench ladder setting=s256 name=ladder_s256" in text
    found = json.loads(once["docs/benchmarks/ladder_s256_h100_2026-12.json"])
    assert [entry["name"] for entry in found["rungs"]] == [
        "b",
        "a",
    ]  # as planned, not as the files lie
    assert found["environment"]["hardware"] == GPU["hardware"]
    assert found["rungs"][1]["step_ms"] == 9.0


def test_not_measured_is_replaced_exactly_where_there_is_a_result(tmp_path, docs):
    before = make_tables([])["overview"]
    assert before.count("not measured") == len(TABLES["queue"])
    failed = result("saves", {"name": "x", "error": "e"})
    nothing = result("doctor", {"name": "machine", "reason": "needs another machine"})
    publish([folder_of(tmp_path / "out", failed, nothing)], docs)
    after = make_tables(
        [read_page(file) for file in (docs / "docs" / "benchmarks").glob("*.json")]
    )["overview"]
    changed = [
        (a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b
    ]
    assert len(changed) == 1
    assert "[h100 2026-12](h100.md#saves-2026-12)" in changed[0][1]
    assert after in (docs / "docs" / "benchmarks" / "README.md").read_text()


def test_an_older_result_stays_with_its_commit_until_it_is_replaced(tmp_path, docs):
    first = folder_of(
        tmp_path / "one",
        *(result("ladder_s256", rung(name, 1.0), i) for i, name in enumerate("ab")),
    )
    publish([first], docs)
    newer = {"code": "c2", "git": GIT | {"commit": "abcdef0123456"}, "date": "2026-12-05T10:00:00"}
    publish([folder_of(tmp_path / "two", result("ladder_s256", rung("b", 3.0), **newer))], docs)
    (file,) = (docs / "docs" / "benchmarks").glob("ladder_s256_h100_*.json")
    kept = {
        entry.entry["name"]: entry.environment["git"]["commit"] for entry in read_page(file).results
    }
    assert kept == {"a": "0123456789abcdef", "b": "abcdef0123456"}
    text = (file.parent / "h100.md").read_text()
    assert "2026-12-01, 2026-12-05; code abcdef0123;" in text
    assert "a: measured by code 0123456789, 2026-12-01, torch 2.11.0." in text
    publish([first], docs)  # an older result replaces nothing
    assert read_page(file).newest["code"] == "c2"
    other = {"hardware": "NVIDIA H100 PCIe", "date": "2026-12-09T10:00:00"}
    publish([folder_of(tmp_path / "three", result("ladder_s256", rung("d", 1.0), **other))], docs)
    assert [entry["name"] for entry in read_page(file).entries] == ["d"]  # a page is of one machine


def test_a_failure_replaces_no_figures():
    good = ({"name": "a"}, "2026-12-01")
    failed = ({"name": "a", "error": "e"}, "2026-12-05")
    newer = ({"name": "a", "speed": 2.0}, "2026-12-03")
    ranked = sorted(
        (Result(entry, {"date": date}) for entry, date in (newer, failed, good)), key=rate
    )
    assert [(result.entry, result.environment["date"]) for result in ranked] == [
        failed,
        good,
        newer,
    ]


def test_a_result_from_a_place_without_git_gets_the_commit_of_its_code(tmp_path, docs, monkeypatch):
    monkeypatch.setattr(
        "scripts.bench.publish.read_git_state",
        lambda: {"commit": "f" * 40, "uncommitted_changes": True},
    )
    rows = [
        result("saves", {"name": "a"}, git=None, code=hash_code()),
        result("step", {"name": "a"}, git=None),
    ]
    publish([folder_of(tmp_path / "out", *rows)], docs)
    text = (docs / "docs" / "benchmarks" / "h100.md").read_text()
    saves, step = re.split("^## ", text, flags=re.MULTILINE)[1:]
    assert "code ffffffffff+;" in saves
    assert "code unknown;" in step  # other code


def test_a_card_is_one_word():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA GeForce RTX 4090": "4090",
    }
    assert {name: name_card({"device": "cuda", "hardware": name}) for name in names} == names
    assert name_card({"device": "cpu", "hardware": "AMD EPYC 9654, 2 threads"}) == "cpu"


def test_the_front_says_what_was_measured_and_where():
    assert "make gpu" in make_tables([])["front"]
    cpu = {
        "hardware": "a CPU, 2 threads",
        "device": "cpu",
        "command": "python -m scripts.bench ladder name=ladder_33m",
    }
    steps = [
        rung("0", 1.0, batch_size=4),
        rung("+ bf16", 1.5),
        rung("+ compiled blocks", 3.0),
        rung("max", 9.0, not_on=["cuda_graph"]),
    ]
    ladder = page("ladder_33m", *steps, **cpu)
    made = make_tables([ladder])["front"]
    assert "| compiled blocks, over the same without | ×2.00 (2.00–2.00) |" in made
    assert "| products in bf16, over fp32 | ×1.50 (1.50–1.50) |" in made
    assert "| two CPU cores, batch 4 |" in made
    assert (
        "over a newcomer's loop | ×3.00 (3.00–3.00) |" in made
    )  # what was asked for and not on does not count
    assert "measured on [a CPU](docs/benchmarks/cpu.md#ladder-33m-2026-12)." in made
    assert "No GPU has measured it yet" in made
    off = {"not_on": ["tf32"], "baseline_not_on": ["tf32"]}  # on neither side of the comparison
    mixers = page(
        "mixers_33m",
        rung("ssd_mlp", 0.5, **off),
        **cpu | {"command": "python -m scripts.bench mixers"},
    )
    assert "over attention (`dit`) | ×0.50 (0.50–0.50) |" in make_tables([ladder, mixers])["front"]
    refused = page("ladder_33m", steps[0], {"name": "+ bf16", "reason": "no bf16 here"}, **cpu)
    assert "bf16" not in make_tables([refused])["front"], "a row that nobody measured"
    on_gpu = make_tables([ladder, page("ladder_s256", *steps)])["front"]
    assert "| two CPU cores, batch 4 | GPU, batch 4 |" in on_gpu
    assert "No GPU" not in on_gpu


def test_the_table_of_techniques_has_figures_as_soon_as_a_gpu_measured_one():
    assert "not measured" not in make_tables([])["techniques"]  # one line says how a GPU fills it
    own = {"part": "alone", "over": "bf16"}
    same = {"speed_q1": 0.9, "speed_q3": 1.1}
    found = [
        rung("runtime.tf32=true over bf16", 2.25, key="tf32", **own),
        rung("runtime.attention=math over bf16", 0.5, key="attention", **own),
        rung("runtime.attention=flash over bf16", 1.5, key="attention", **own),
        rung(
            "runtime.cuda_graph=true over bf16",
            2.0,
            key="cuda_graph",
            **own | {"not_on": ["cuda_graph"]},
        ),
        rung("runtime.fused_adamw=true over bf16", 1.01, key="fused_adamw", **own | same),
    ]
    made = make_tables([page("techniques_bf16", *found)])["techniques"]
    assert "| ×2.25, 75% of the memory |" in made
    assert "| ×1.50, 75% of the memory (flash) |" in made
    assert "| no difference, 75% of the memory |" in made
    assert made.count("| – |") == len(TECHNIQUES) - 3  # what was not on was not measured
    assert (
        "[NVIDIA H100 80GB HBM3, torch 2.11.0, 2026-12-01]"
        "(benchmarks/h100.md#techniques-bf16-2026-12)" in made
    )


def test_rungs_are_told_from_the_rung_before():
    entries = [
        rung("a", 1.0),
        {"name": "b", "reason": "no GPU"},
        rung("c", 2.0, speed_q1=1.9, speed_q3=2.2),
        rung("d", 2.0, not_on=["tf32"]),
    ]
    found = add_remarks("ladder", entries)
    assert [entry.get("times_before") for entry in found] == [None, None, 2.0, 1.0]
    assert [entry["remark"] for entry in found] == ["", "no GPU", "", "not on: tf32"]
    assert found[3]["times_before_q1"] == 2.0 / 2.2
    lines = format_entries("ladder", entries)[0].splitlines()
    assert lines[2].split()[:2] == ["b", "–"]
    assert lines[2].endswith("–  no GPU")
    assert format_entries("step", [{"name": "a", "error": "e", "text": "beside"}])[1] == "beside"


def test_a_page_without_its_marks_is_told(docs):
    (docs / "README.md").write_text("# no marks")
    with pytest.raises(ValueError, match=r"README\.md has lost the lines"):
        publish([], docs)
    with pytest.raises(ValueError, match="x has lost"):
        replace_between("text", "<a>", "<b>", "", "x")


def test_tables_align():
    lines = format_table(
        [("name", "ms"), ("a", "1.5"), ("longer", "10.25"), ("none", None)]
    ).splitlines()
    assert lines == ["name       ms", "a         1.5", "longer  10.25", "none        –"]


def rows_of_guides():
    return [row for group in GUIDES.values() for row in group["rows"]]


def test_every_figure_of_the_guides_has_its_source_and_its_status():
    known = {"what", "key", "figure", "says", "item", "cases", "shows", "counted", "declined"}
    assert len(rows_of_guides()) >= 30
    for group in GUIDES.values():
        assert group["gpu"]  # what settles the rows that wait
        for row in group["rows"]:
            assert row.keys() <= known, row
            assert {"what", "figure"} <= row.keys(), row
            statuses = [status for status in ("item", "counted", "declined") if status in row]
            assert len(statuses) <= 1, row
            assert ("item" in row) == ("cases" in row) == ("shows" in row), row
            assert "says" not in row or "](https://" in row["says"], row


def test_every_case_of_the_guides_is_one_that_its_item_measures():
    cases = {}
    for row in rows_of_guides():
        if "item" in row:
            command, *words = TABLES["queue"][row["item"]]["words"].split()
            if row["item"] not in cases:
                cases[row["item"]] = {case.name for case in plan_job(command, words).cases}
            assert {*row["cases"].values()} <= cases[row["item"]], row


def test_the_page_of_guides_shows_a_figure_and_where_it_was_measured(monkeypatch):
    """Of a GPU where there is one, else of a CPU, never of a case that failed."""
    row = {"what": "all", "figure": "2 ×", "item": "counted", "shows": "{peak_change:+.0%}"}
    row["cases"] = {"one": "bf16", "two": "other"}
    later = {"what": "later", "key": "a.b, c.d", "figure": "3 ×"}
    groups = {"Memory": {"gpu": "`plan`", "rows": [row, later | {"declined": "why"}, later]}}
    monkeypatch.setattr(publisher, "GUIDES", groups)
    of_gpu = GPU | {"command": "python -m scripts.bench counted"}
    of_cpu = of_gpu | {"hardware": "a CPU", "device": "cpu"}
    entry = {"name": "bf16", "peak_change": -0.5}

    def page(benchmark, *entries, run):
        return Page(benchmark, [Result(entry, run) for entry in entries])

    failed = {"name": "other", "peak_change": 9.0, "error": "it failed"}
    cpu = page("counted_b256", entry, failed, run=of_cpu)
    text = make_tables([cpu])["guides"]
    assert "2 × | one: -50% ([cpu](benchmarks/cpu.md#counted-b256-2026-12))" in text
    assert "| later | `a.b`, `c.d` | 3 × | declined: why |" in text
    assert "| later | `a.b`, `c.d` | 3 × | – |" in text
    gpu = page("counted", entry | {"peak_change": -0.25}, run=of_gpu)
    assert (
        "one: -25% ([h100](benchmarks/h100.md#counted-2026-12))"
        in make_tables([cpu, gpu])["guides"]
    )


def test_what_the_guides_page_counts_by_hand_is_so():
    counted = " ".join(row["counted"] for row in rows_of_guides() if "counted" in row)
    L, s, b, h, a = 32, 1024, 100, 4096, 32
    assert f"{2 * L * s * b * h * (34 + 5 * a * s // h) / 1e12:.2f} TB" in counted
    assert f"{b * s / 1e6:.1f} M tokens" in counted
    assert f"{3 * 512 * 512 // (4 * 64 * 64)} ×" in counted
    for layer in (0, 1):
        mixer = Attention(64, 64, (32, 32), window=8, layer=layer)
        mixer.init_weights()
        seen = mixer.windows[:, None] == mixer.windows
        mask = create_block_mask(
            lambda b, h, q, k, seen=seen: seen[q, k], None, None, 1024, 1024, device="cpu"
        )
        assert f"{100 * (1.0 - seen.float().mean().item()):.0f} %" in counted
        assert f"{mask.sparsity():.0f} %" in counted
