"""Makes pages, charts and the tables of README and docs from measured rows.

    python -m scripts.bench publish bench/gpu
    python -m scripts.bench publish bench another/folder
    python -m scripts.bench publish

Rows go into docs/benchmarks/<benchmark>_<card>_<yyyy-mm>.json, beside those that lie there: a newer
row replaces the one of its name, and an older row keeps the commit that measured it. Page and chart
are made from that file, the tables in README.md, docs/techniques.md and docs/benchmarks/README.md
from all such files; without a folder, too. What has no row says "not measured".
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel.stack import TECHNIQUES
from common.errors import UserError
from common.files import ROOT, write_atomically
from scripts.bench import claims
from scripts.bench.__main__ import BENCHMARKS, benchmark_of
from scripts.bench.gpu import ITEMS
from scripts.bench.ladder import rungs
from scripts.bench.report import bar_chart, put_between
from scripts.bench.rows import Line, Results, code_hash, named, shown
from scripts.timing import NO_DIFFERENCE, difference
from training.environment import git_state

MARKS = "<!-- {}: made by `python -m scripts.bench publish` -->\n", "<!-- end of {} -->"


class Page(NamedTuple):
    """The rows of one benchmark on one card, in the order of its plan."""

    name: str
    card: str
    lines: list[Line]

    @property
    def newest(self) -> dict[str, Any]:
        """With what the newest row was measured."""
        return max(self.lines, key=lambda line: line["time"])["run"]

    @property
    def stem(self) -> str:
        return f"{self.name}_{self.card}_{self.newest['date'][:7]}"

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [line["entry"] for line in self.lines]


def card_of(run: dict[str, Any]) -> str:
    """cpu, or the GPU's model as one word: h100 for an NVIDIA H100 80GB HBM3."""
    if run["device"] != "cuda":
        return run["device"]
    words = [
        word for word in re.split(r"[^a-z0-9]+", run["hardware"].lower()) if re.search(r"\d", word)
    ]
    return words[0] if words else "gpu"


def pages_in(folder: Path) -> dict[tuple[str, str], Page]:
    """(benchmark, card) -> the page that lies there."""
    found = {}
    for file in sorted(folder.glob("*_????-??.json")):
        lines = json.loads(file.read_text())["rows"]
        page = Page(lines[0]["benchmark"], card_of(lines[0]["run"]), lines)
        found[page.name, page.card] = page
    return found


def with_commit(line: Line) -> Line:
    """The line with the commit of this checkout, where it was measured with this code in a place
    without git."""
    run = line["run"]
    if run["commit"] != "unknown":
        return line
    here = git_state()
    file = ROOT / "scripts" / "bench" / f"{BENCHMARKS[run['command'].split()[3]]}.py"
    if here is None or run["code"] != code_hash(file):
        return line
    return line | {"run": run | {"commit": named(here)}}


def merge(pages: dict[tuple[str, str], Page], results: Results) -> list[Page]:
    """The pages that the rows of a folder change; one on which nothing could be had on that machine
    is none.

    A page is of one machine, the one that measured last. A row goes when the same command plans it
    no more.
    """
    plans = results.plans()
    groups = defaultdict(list)
    for line in map(with_commit, results.lines()):
        groups[line["benchmark"], card_of(line["run"])].append(line)
    changed = []
    for (name, card), lines in groups.items():
        old = pages[name, card].lines if (name, card) in pages else []
        hardware = max((*old, *lines), key=lambda line: line["time"])["run"]["hardware"]
        plan = plans.get(name, {"run": {"hardware": None}})
        found = []
        for line in shown((*old, *lines)):
            of_plan = all(line["run"][key] == plan["run"].get(key) for key in ("hardware", "keys"))
            if line["run"]["hardware"] == hardware and (
                not of_plan or line["entry"]["name"] in plan["seconds"]
            ):
                found.append(line)
        found.sort(key=lambda line: line["order"])
        if found != old and any("reason" not in line["entry"] for line in found):
            changed.append(Page(name, card, found))
    return changed


def write(page: Page, folder: Path) -> None:
    """Writes the rows, the page and the chart, and says where if the page changes; those of an
    earlier month go."""
    for file in folder.glob(f"{page.name}_{page.card}_????-??.*"):
        if file.stem != page.stem:
            file.unlink()
    base = folder / page.stem
    text = text_of(page)
    file = base.with_suffix(".md")
    if not file.is_file() or file.read_text() != text:
        print(file)
    rows = ",\n".join(map(json.dumps, page.lines))  # a line a row, as a difference shows it best
    write_atomically(base.with_suffix(".json"), f'{{"rows": [\n{rows}\n]}}\n')
    write_atomically(file, text)
    bars = benchmark_of(run_command(page)).bars
    title, drawn = bars(page.entries) if bars else ("", [])
    if drawn:
        bar_chart(base.with_suffix(".png"), f"{title}; {page.newest['hardware']}", drawn)


def run_command(page: Page) -> str:
    """The command, such as ladder, that measured the page."""
    return page.newest["command"].split()[3]


def text_of(page: Page) -> str:
    """The page: hardware, versions, dates, command, tables; and which rows are of earlier code."""
    run = page.newest
    versions = ", ".join(
        f"{name} {run['versions'][name]}" for name in ("python", "torch", "triton")
    )
    texts = benchmark_of(run_command(page)).texts(page.entries)
    dates = sorted({line["run"]["date"] for line in page.lines})
    when = " to ".join(dates[:: max(1, len(dates) - 1)])
    lines = [
        f"# {page.name.replace('_', ' ')}, {page.card}",
        "",
        f"{run['hardware']}; {versions}; {when}; code {run['commit']}; {rounds_of(page)}.",
        "",
        f"    {run['command']}",
        "",
        *("".join(f"    {line}".rstrip() + "\n" for line in text.splitlines()) for text in texts),
    ]
    older: dict[str, list[str]] = defaultdict(list)
    for line in page.lines:
        if line["run"]["code"] != run["code"] or line["run"]["versions"] != run["versions"]:
            code = (
                f"{line['run']['commit']}, {line['run']['date']}, torch "
                f"{line['run']['versions']['torch']}"
            )
            older[code].append(line["entry"]["name"])
    lines += [
        f"Measured earlier, by code {commit}: {', '.join(names)}.\n"
        for commit, names in older.items()
    ]
    return "\n".join([*lines, f"Every figure: [{page.stem}.json]({page.stem}.json).", ""])


def source(page: Page, folder: str = "docs/benchmarks/") -> str:
    """Hardware, version and date, with a link to the page, n and the command."""
    run = page.newest
    link = (
        f"[{run['hardware']}, torch {run['versions']['torch']}, "
        f"{run['date']}]({folder}{page.stem}.md)"
    )
    return f"{link}, {rounds_of(page)}, `{run['command']}`"


def rounds_of(page: Page) -> str:
    rounds = sorted({e["n"] for e in page.entries if "n" in e})
    return f"n = {', '.join(map(str, rounds or [1]))}"


def of_kind(pages: Sequence[Page], name: str, cuda: bool) -> list[Page]:
    """Pages of a benchmark, newest first."""
    found = [
        page for page in pages if page.name == name and (page.newest["device"] == "cuda") == cuda
    ]
    return sorted(found, key=lambda page: page.newest["date"], reverse=True)


def overview(pages: Sequence[Page]) -> str:
    """docs/benchmarks/README.md's table: what the queue measures, and where it was."""

    def links(names: Sequence[str], cuda: bool, otherwise: str) -> str:
        found = [page for name in names for page in of_kind(pages, name, cuda)]
        return (
            ", ".join(f"[{page.card} {page.newest['date'][:7]}]({page.stem}.md)" for page in found)
            or otherwise
        )

    lines = ["| what | command | on a GPU | on two CPU cores |", "|---|---|---|---|"]
    for item in ITEMS:
        small = links((f"{item.name}_tiny", ON_A_CPU.get(item.name, "")), False, "")
        lines.append(
            f"| {item.what} | `{' '.join(item.words)}` | "
            f"{links((item.name,), True, 'not measured')} | {small} |"
        )
    return "\n".join(lines) + "\n"


ON_A_CPU = {"ladder_s256": "ladder_33m", "mixers_256": "mixers_33m"}
"""Benchmark -> what it is called at a batch for a CPU; docs/benchmarks/README.md has the
commands."""
FRONT = (
    ("compiled blocks, over the same without", "ladder_s256", "+ compiled blocks"),
    ("products in bf16, over fp32", "ladder_s256", "+ bf16"),
    ("the scan in a transformer (`ssd_mlp`), over attention (`dit`)", "mixers_256", "ssd_mlp"),
    ("all that is on here, over a newcomer's loop", "ladder_s256", None),
)
"""What README's front shows: a sentence, the benchmark and its row; None is the top rung."""


def front(pages: Sequence[Page]) -> str:
    """README's first table: a training step at 33 M parameters and 256 tokens, where it was
    measured."""
    found = {}
    for cuda in (False, True):
        newest = {
            name: of_kind(pages, name if cuda else ON_A_CPU[name], cuda)[:1] for _, name, _ in FRONT
        }
        if any(newest.values()):
            found[cuda] = {name: page for name, pages_of in newest.items() for page in pages_of}
    if not found:
        return "Not measured yet: `make gpu`.\n"
    heads = []
    for cuda, by_name in found.items():
        sizes = sorted(
            {
                e["batch_size"]
                for page in by_name.values()
                for e in page.entries
                if "batch_size" in e
            }
        )
        heads.append(f"{'GPU' if cuda else 'two CPU cores'}, batch {', '.join(map(str, sizes))}")
    lines = [
        f"| a training step, 33 M parameters, 256 tokens | {' | '.join(heads)} |",
        "|---" * (len(found) + 1) + "|",
    ]
    for what, name, row in FRONT:
        cells = [
            times(by_name[name], row) if name in by_name else "not measured"
            for by_name in found.values()
        ]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    sources = dict.fromkeys(source(page) for by_name in found.values() for page in by_name.values())
    missing = (
        ""
        if True in found
        else " No GPU has measured it yet: `make gpu` fills the rest in slots of nine minutes."
    )
    return (
        "\n".join(
            [*lines, "", f"Median and quartiles of rounds in turn: {'; '.join(sources)}.{missing}"]
        )
        + "\n"
    )


def times(page: Page, row: str | None) -> str:
    """A speed with its quartiles, of a rung over the rung before; of what was on there."""
    measured = [e for e in rungs(page.entries) if "speed" in e]
    # nothing that the other side has
    on = [e for e in measured if {*e["not_on"]} <= {*e.get("baseline_not_on", ())}]
    entry = on[-1] if row is None and on else next((e for e in on if e["name"] == row), None)
    if entry is None:
        cannot = next(
            (e["reason"] for e in page.entries if e["name"] == row and "reason" in e), None
        )
        return f"not measured: {cannot}" if cannot else "not measured"
    name = "times_before" if row is not None and page.name.startswith("ladder") else "speed"
    same = f"{NO_DIFFERENCE}: " if difference(entry, name) == NO_DIFFERENCE else ""
    return f"{same}×{entry[name]:.2f} ({entry[f'{name}_q1']:.2f}–{entry[f'{name}_q3']:.2f})"


def techniques(pages: Sequence[Page]) -> str:
    """README's table of techniques; with figures as soon as a GPU has measured one."""
    heads = ("techniques_bf16", "techniques_fp32")
    measured = [page for name in heads for page in of_kind(pages, name, True)[:1]]
    lines = [
        "| key | what it does |"
        + "".join(f" over eager in {page.name[-4:]} |" for page in measured)
    ]
    lines.append("|---|---|" + "---|" * len(measured))
    for kind in TECHNIQUES:
        lines.append(
            f"| `{kind.key}` | {kind.summary} |"
            + "".join(f" {alone(page, kind.key)} |" for page in measured)
        )
    if measured:
        lines += ["", f"Alone, on a GPU: {', '.join(source(page) for page in measured)}."]
    return "\n".join(lines) + "\n"


def alone(page: Page, key: str) -> str:
    """Speed and memory of a technique over its baseline; the best of its ways."""
    found = [
        e for e in page.entries if e.get("part") == "alone" and e["key"] == key and "speed" in e
    ]
    found = [e for e in found if key not in e["not_on"]]
    if not found:
        return "not measured"
    best = max(found, key=lambda e: e["speed"])
    speed = NO_DIFFERENCE if difference(best, "speed") == NO_DIFFERENCE else f"×{best['speed']:.2f}"
    memory = best["memory_reserved_peak"]
    base = best["baseline_memory_reserved_peak"]
    way = "" if len(found) == 1 else f" ({best['name'].split()[0].partition('=')[2]})"
    return speed + (f", {memory / base:.0%} of the memory" if memory and base else "") + way


def tables(root: Path, pages: Sequence[Page]) -> dict[Path, str]:
    """The pages whose tables are made from results, made anew; ValueError where the marks around
    one are gone."""
    told = (of_kind(pages, "claims", True) or of_kind(pages, "claims_tiny", False))[:1]
    claimed = claims.section(
        [e for page in told for e in page.entries],
        "".join(source(page, "benchmarks/") for page in told),
    )
    made = {
        root / "README.md": {"front": front(pages), "techniques": techniques(pages)},
        root / "docs" / "benchmarks" / "README.md": {"overview": overview(pages)},
        root / "docs" / "techniques.md": {"claims": claimed},
    }
    texts = {}
    for file, parts in made.items():
        texts[file] = file.read_text()
        for name, content in parts.items():
            start, end = (mark.format(name) for mark in MARKS)
            texts[file] = put_between(texts[file], start, end, content, str(file.relative_to(root)))
    return texts


def publish(folders: Sequence[Path], root: Path) -> None:
    """Merges the folders' rows into the docs below `root`, and makes pages, charts and tables
    anew."""
    docs = root / "docs" / "benchmarks"
    for folder in folders:
        results = Results(folder)
        if not results.size():
            raise UserError(
                f"{folder} has no rows.jsonl with rows; name the `out` folder of a benchmark."
            )
        for page in merge(pages_in(docs), results):
            write(page, docs)
    pages = list(pages_in(docs).values())
    for page in pages:
        write(page, docs)
    for file, text in tables(root, pages).items():
        if text != file.read_text():
            write_atomically(file, text)
            print(file)


def main(words: list[str]) -> None:
    publish([Path(word).expanduser() for word in words], ROOT)
