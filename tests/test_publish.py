"""Pages, charts and tables from rows: a row replaces "not measured" exactly where it exists; twice
is as once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripts.bench.gpu import ITEMS
from scripts.bench.rows import Results, code_hash, named, shown

from accel.stack import TECHNIQUES
from common.files import ROOT
from scripts.bench.publish import (
    Page,
    card_of,
    front,
    overview,
    pages_in,
    publish,
    tables,
    techniques,
    text_of,
    with_commit,
)
from training.environment import git_state

VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"}
GPU = {
    "hardware": "NVIDIA H100 80GB HBM3",
    "device": "cuda",
    "versions": VERSIONS,
    "date": "2026-12-01",
}


def line(
    benchmark: str, entry: dict[str, Any], order: int = 0, time: float = 1.0, **run: Any
) -> dict[str, Any]:
    command = f"python -m scripts.bench {benchmark.partition('_')[0]} setting=s256 name={benchmark}"
    run = (
        {"code": "c1", "commit": "0123456789", "keys": {}, "overrides": [], "command": command}
        | GPU
        | run
    )
    return {
        "benchmark": benchmark,
        "order": order,
        "seconds": 1.0,
        "time": time,
        "entry": entry,
        "run": run,
    }


def rung(name: str, speed: float, **more: Any) -> dict[str, Any]:
    ends = {
        f"{key}{end}": value
        for key, value in (("step_ms", 9.0), ("speed", speed))
        for end in ("", "_q1", "_q3")
    }
    memory = {"memory_reserved_peak": 3, "baseline_memory_reserved_peak": 4}
    figures = {
        "samples_per_s": 100 * speed,
        "mfu": 0.25,
        "warm_up_s": 1.0,
        "loss_deviation": 0.0,
        "n": 5,
        "not_on": [],
    }
    return {"name": name} | ends | memory | figures | more


def folder_of(path: Path, *lines: dict[str, Any]) -> Path:
    results = Results(path)
    for one in lines:
        results.add(one)
    return path


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The pages with tables, and no results."""
    root = tmp_path / "root"
    (root / "docs" / "benchmarks").mkdir(parents=True)
    for page in ("README.md", "docs/techniques.md", "docs/benchmarks/README.md"):
        shutil.copy(ROOT / page, root / page)
    return root


def files(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()
    }


def test_pages_and_tables_are_those_of_the_results():
    """`bench publish` has been run since the last result was kept, and since what shows it was
    changed."""
    pages = list(pages_in(ROOT / "docs" / "benchmarks").values())
    for page in pages:
        assert (ROOT / "docs" / "benchmarks" / f"{page.stem}.md").read_text() == text_of(page)
    for file, text in tables(ROOT, pages).items():
        assert file.read_text() == text, f"{file.name}: run python -m scripts.bench publish"


def test_twice_is_the_same_as_once(tmp_path, docs):
    rows = [
        line("ladder_s256", rung(name, speed), i)
        for i, (name, speed) in enumerate((("a", 1.0), ("b", 2.0)))
    ]
    measured = folder_of(tmp_path / "rows", *rows)
    publish([measured], docs)
    once = files(docs)
    assert {
        f"docs/benchmarks/ladder_s256_h100_2026-12.{kind}" for kind in ("json", "md", "png")
    } <= {*once}
    publish([measured, measured], docs)
    publish([], docs)
    assert files(docs) == once
    page = once["docs/benchmarks/ladder_s256_h100_2026-12.md"].decode()
    for part in (
        "NVIDIA H100 80GB HBM3",
        "torch 2.11.0",
        "2026-12-01",
        "code 0123456789",
        "n = 5",
        "    b ",
    ):
        assert part in page
    assert "    python -m scripts.bench ladder setting=s256 name=ladder_s256" in page


def test_not_measured_is_replaced_exactly_where_there_is_a_row(tmp_path, docs):
    before = overview([])
    assert before.count("not measured") == len(ITEMS)
    publish(
        [
            folder_of(
                tmp_path / "rows",
                line("saves_s256", {"name": "background", "error": "e"}),
                line("saves", {"name": "x", "error": "e"}),
            )
        ],
        docs,
    )
    pages = list(pages_in(docs / "docs" / "benchmarks").values())
    after = overview(pages)
    changed = [
        (a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b
    ]
    assert len(changed) == 1
    assert "[h100 2026-12](saves_h100_2026-12.md)" in changed[0][1]
    assert after in (docs / "docs" / "benchmarks" / "README.md").read_text()


def test_an_older_row_stays_with_its_commit_until_it_is_replaced(tmp_path, docs):
    first = [line("ladder_s256", rung(name, 1.0), i) for i, name in enumerate("ab")]
    publish([folder_of(tmp_path / "one", *first)], docs)
    newer = {"code": "c2", "commit": "abcdef0123", "date": "2027-01-05"}
    second = line("ladder_s256", rung("b", 3.0), 1, time=2.0, **newer)
    publish([folder_of(tmp_path / "two", second)], docs)
    (json_file,) = (docs / "docs" / "benchmarks").glob("ladder_s256_h100_*.json")
    # and nothing is left of the month before
    assert json_file.name == "ladder_s256_h100_2027-01.json"
    assert [
        (row["entry"]["name"], row["run"]["commit"])
        for row in json.loads(json_file.read_text())["rows"]
    ] == [("a", "0123456789"), ("b", "abcdef0123")]
    text = json_file.with_suffix(".md").read_text()
    assert "Measured earlier, by code 0123456789, 2026-12-01, torch 2.11.0: a." in text
    publish([folder_of(tmp_path / "three", *first)], docs)  # older rows replace nothing
    assert json_file.with_suffix(".md").read_text() == text


def test_a_failure_replaces_no_figures(tmp_path):
    good = line("x", {"name": "a"})
    hung = line("x", {"name": "a", "error": "not done"}, time=5.0) | {"limit": 9.0}
    failed = line("x", {"name": "a", "error": "TypeError"}, time=6.0)
    newer = line("x", {"name": "a", "speed": 2.0}, time=3.0)
    assert shown([good, hung, failed]) == shown([hung, failed, good]) == [good]
    assert shown([hung, failed]) == [failed]
    assert shown([good, newer]) == shown([newer, good]) == [newer]
    other = line("x", {"name": "a"}, hardware="NVIDIA H200")
    assert shown([good, other]) == [good, other]
    results = Results(folder_of(tmp_path, good, other, hung, failed))
    results.compact()  # drops the time-out, which is neither shown nor the newest
    assert results.lines() == [good, other, failed]
    assert results.newest("x", GPU["hardware"]) == {"a": failed}


def test_a_page_is_of_one_machine_and_of_what_is_planned(tmp_path, docs):
    def names() -> list[str]:
        (page,) = pages_in(docs / "docs" / "benchmarks").values()
        return [row["entry"]["name"] for row in page.lines]

    first = [line("ladder_s256", rung(name, 1.0), i) for i, name in enumerate("abc")]
    publish([folder := folder_of(tmp_path / "one", *first)], docs)
    Results(folder).note("ladder_s256", run=first[0]["run"], seconds={"a": 1.0, "c": 1.0})
    publish([folder], docs)
    assert names() == ["a", "c"]  # the same command plans b no more
    Results(folder).note(
        "ladder_s256", run=first[0]["run"] | {"keys": {"families": ["x"]}}, seconds={"a": 1.0}
    )
    publish([folder], docs)
    assert names() == ["a", "b", "c"]  # a command with other keys plans for itself
    other = line("ladder_s256", rung("d", 1.0), time=9.0, hardware="NVIDIA H100 PCIe")
    publish([folder_of(tmp_path / "two", other)], docs)
    assert names() == ["d"]


def test_a_row_from_a_place_without_git_gets_the_commit_of_its_code(tmp_path, docs, monkeypatch):
    of_ladder = {"code": code_hash(ROOT / "scripts" / "bench" / "ladder.py"), "commit": "unknown"}
    here = {"code": code_hash(ROOT / "scripts" / "bench" / "saves.py"), "commit": "unknown"}
    found = with_commit(line("saves", {"name": "a"}, **here))["run"]["commit"]
    state = git_state()
    assert found == (named(state) if state else "unknown")
    publish([folder_of(tmp_path / "rows", line("ladder_s256", rung("a", 1.0), **of_ladder))], docs)
    once = files(docs)
    monkeypatch.setattr(
        "scripts.bench.publish.git_state", lambda: {"commit": "f" * 40, "uncommitted_changes": True}
    )
    publish([tmp_path / "rows"], docs)
    assert files(docs) == once  # the first one stays, whatever is committed since
    # other code
    assert with_commit(line("saves", {"name": "a"}, commit="unknown"))["run"]["commit"] == "unknown"


def test_a_card_is_one_word():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA GeForce RTX 4090": "4090",
    }
    assert {name: card_of({"device": "cuda", "hardware": name}) for name in names} == names
    assert card_of({"device": "cpu", "hardware": "AMD EPYC 9654, 2 threads"}) == "cpu"


def test_the_tables_of_the_readme_say_what_was_measured_and_where():
    assert "not measured" not in techniques([])  # one line says how a GPU fills it
    assert "make gpu" in front([])
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
    page = Page(
        "ladder_33m", "cpu", [line("ladder_33m", step, i, **cpu) for i, step in enumerate(steps)]
    )
    made = front([page])
    assert "| compiled blocks, over the same without | ×2.00 (2.00–2.00) |" in made
    assert "| products in bf16, over fp32 | ×1.50 (1.50–1.50) |" in made
    assert "| two CPU cores, batch 4 |" in made
    # what was asked for and not on does not count
    assert "over a newcomer's loop | ×3.00 (3.00–3.00) |" in made
    at = "[a CPU, 2 threads, torch 2.11.0, 2026-12-01](docs/benchmarks/ladder_33m_cpu_2026-12.md)"
    assert f"{at}, n = 5, `python -m scripts.bench ladder name=ladder_33m`" in made
    assert "No GPU has measured it yet" in made
    off = {"not_on": ["tf32"], "baseline_not_on": ["tf32"]}  # on neither side of the comparison
    mixers = Page("mixers_33m", "cpu", [line("mixers_33m", rung("ssd_mlp", 0.5, **off), **cpu)])
    assert "over attention (`dit`) | ×0.50 (0.50–0.50) |" in front([page, mixers])
    own = {"part": "alone", "over": "bf16"}
    found = [
        rung("runtime.tf32=true over bf16", 2.345, key="tf32", **own),
        rung(
            "runtime.cuda_graph=true over bf16",
            2.0,
            key="cuda_graph",
            **own | {"not_on": ["cuda_graph"]},
        ),
        rung(
            "runtime.fused_adamw=true over bf16",
            1.0,
            key="fused_adamw",
            **own | {"speed_q1": 0.9, "speed_q3": 1.1},
        ),
    ]
    table = techniques(
        [
            Page(
                "techniques_bf16",
                "h100",
                [line("techniques_bf16", e, i) for i, e in enumerate(found)],
            )
        ]
    )
    assert "| ×2.35, 75% of the memory |" in table or "| ×2.34, 75% of the memory |" in table
    assert "| no difference, 75% of the memory |" in table
    assert table.count("not measured") == len(TECHNIQUES) - 2  # what was not on was not measured
    assert (
        "[NVIDIA H100 80GB HBM3, torch 2.11.0, "
        "2026-12-01](docs/benchmarks/techniques_bf16_h100_2026-12.md)" in table
    )


def test_a_page_without_its_marks_is_told(docs):
    (docs / "README.md").write_text("# no marks")
    with pytest.raises(ValueError, match=r"README\.md has lost the lines"):
        publish([], docs)
