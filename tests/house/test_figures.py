"""No figure of a page is without a ground, so none goes stale unseen.

A figure is a number in the text of a page. These are names: `code` and code blocks, the addresses
of links, dates, versions, numbers of list items, and numbers joined to a word (fp32, Mamba-2,
16-bit). A whole number below ten is language, unless a unit follows.

`bench publish` writes the figures of its blocks. A section with a date and a command says how to
measure its own again. A linked section of another page, of the log or of the results may state a
figure, perhaps with more digits. All others are in figures.yaml, which explains their grounds.
"""

import re
from functools import cache

import pytest

from common.config.compose import compose, parse_yaml
from common.files import ROOT, read_object
from scripts.bench.floor import SETTING, count_block
from tests.harness.scaling import GPUS, find_share  # noqa: F401  # figures.yaml uses them

GROUNDS = parse_yaml((ROOT / "tests/assets/figures.yaml").read_text())
NO_TEXT = r"(?ms)<!-- (\w+): made by .*?<!-- end of \1 -->|^\d+\. "
DATE = r"\d{4}-\d\d-\d\d"
ADDRESS = r"\]\([^)]*\)"
NAME = (
    rf"`[^`]*`|{ADDRESS}|{DATE}|\d+\.\d+\.\d+|\d{{4}}\.\d{{5}}|(?:Python|torch|Triton|al\.) [\d.]+"
)
UNIT = (
    r" ?(?:%|×|x\b|[KkMGT]?i?B\b|M\b|[GT]FLOP|[mµ]?s\b|min\b|GPUs|bytes|bits|steps|times"
    r"|seconds|minutes|hours|days|dB\b)"
)
FIGURE = (
    rf"(?<![\w.#])(?<![^\W\d]-)(?!\d+(?:-bit|xx))(?!(?<!×)\d(?![.,]?\d|e-?\d|{UNIT}))"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
)
HOW = rf"(?=.*{DATE})(?=.*`(?:python|make) )"


def split_sections(text):
    """Maps the anchor of each heading to the text below it, in one line with code as `python `."""
    text = re.sub(r"(?s)```.*?```", "`python `", re.sub(NO_TEXT, "", text))
    sections = {}
    for section in re.split(r"(?m)^#+ ", text):
        anchor = re.sub(r"[^\w -]", "", section.partition("\n")[0].lower()).replace(" ", "-")
        sections[anchor] = " ".join([sections.get(anchor, ""), *section.split()])
    return sections


def find_figures(text):
    return re.findall(FIGURE, re.sub(NAME, "`", text))


def is_so(snippet, sections, ground):
    places = [section for section in sections if snippet in section]
    assert len(places) == 1, f"{snippet} stands in {len(places)} sections"
    match ground:
        case {"counted": expression}:
            return eval(expression, globals()) == snippet
        case {"code": file, "as": words}:
            return re.search(words, (ROOT / file).read_text())
        case {"source": address}:
            return address in places[0]
    return ground.keys() == {"chosen"}


def is_stated(figure, page, section):
    """Tells whether a section that this one links to has the figure, perhaps with more decimals."""
    stated = []
    for file, anchor in re.findall(r"\]\(([^)#:]+)#([^)]+)\)", section):
        linked = split_sections((ROOT / page).parent.joinpath(file).read_text())
        stated += find_figures(linked.get(anchor, ""))
    digits = len(figure.partition(".")[2])
    stated = [other for other in stated if digits or "." not in other]
    return figure in [f"{float(other.replace(',', '')):,.{digits}f}" for other in stated]


def find_faults(page, text, grounds):
    """Finds the entries that are not so, and then the figures without a ground."""
    sections = split_sections(text).values()
    faults = [snippet for snippet in grounds if not is_so(snippet, sections, grounds[snippet])]
    for section in sections:
        if not re.match(HOW, re.sub(ADDRESS, "", section)):
            rest = section
            for snippet in grounds:
                rest = rest.replace(snippet, "", 1)
            faults += [each for each in find_figures(rest) if not is_stated(each, page, section)]
    return faults


@cache
def count_moves(name):
    return count_block(compose([*SETTING, f"model={name}"]).cfg)


def show_moves(name, *ops):
    """Shows the bytes of ops, forward and backward, in kB for each of 256 tokens."""
    moves = count_moves(name).moves
    sums = [sum(way[op] for op in way if op.startswith(ops)) for way in moves]
    return f"{sums[0] / 256e3:.1f} + {sums[1] / 256e3:.1f}"


def read_cases(name):
    return read_object(ROOT / f"docs/benchmarks/{name}.json")["cases"]


@pytest.mark.parametrize("page", GROUNDS)
def test_every_figure_has_a_ground(page):
    assert find_faults(page, (ROOT / page).read_text(), GROUNDS[page]) == []


def test_no_page_is_left_out_and_figures_that_are_off_or_without_a_ground_are_found():
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert GROUNDS.keys() == pages - {"docs/LOG.md"} | {"README.md"}
    off = {"31 ms": {"counted": "f'{16 * 2} ms'"}}
    assert find_faults("README.md", "A step takes 31 ms, ten 9 s.", off) == ["31 ms", "9"]
