"""What people see of a comparison: the page, its pictures and the terminal."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from meshwise.layout import Layout
from meshwise.plans import Candidate, Estimate, Plan, RankMemory, Rejection
from meshwise.report.comparison import Bar, Comparison, LayoutResult, MemoryBar, ScalingPoint, UnitShare
from meshwise.report.measured import bars_of, measured_parts
from meshwise.report.page import make_page, write_page
from meshwise.report.pictures import write_pictures
from meshwise.report.shares import unit_rows
from meshwise.report.terminal import show_comparison, show_plan
from meshwise.schedule.actions import Action, Op

EVIL = '<script>alert("x")</script> & $x^2$'
MIB = float(1 << 20)


def result(layout: str, seconds: float, *, devices: int = 2, error: str = "") -> LayoutResult:
    parts = {"compute": 0.7 * seconds, "bubble": 0.2 * seconds, "communication": 0.1 * seconds}
    bars = (Bar(rank=0, kind="F", label="F0.0", start=0.0, end=0.4 * seconds),)
    return LayoutResult(
        layout=layout,
        num_devices=devices,
        samples_per_step=64,
        predicted_seconds=0.9 * seconds,
        seconds=() if error else (seconds, 1.1 * seconds),
        time_parts={} if error else parts,
        predicted_time_parts=parts,
        memory=tuple(
            MemoryBar(rank=r, parts={"parameters": 5 * MIB, "runtime": 9 * MIB}, reserved=16 * MIB, measured=15 * MIB)
            for r in range(devices)
        ),
        timeline=() if error else bars,
        predicted_timeline=bars,
        error=error,
    )


def comparison(**changes: object) -> Comparison:
    fields: dict[str, object] = {
        "job": f"job {EVIL}",
        "machine": "2 cores",
        "facts": (("model", EVIL),),
        "results": (result("dp=1", 0.02, devices=1), result("dp=2", 0.01), result("pp=2", 0.02, error=EVIL)),
        "rejected": (Rejection(layout="dp=4", reason="9.1 GiB of 8.0 GiB on every rank"),),
        "best": "dp=2",
        "advice": "Take dp=2: twice as fast as one device.",
        "limit_bytes": 16.5 * MIB,
        "units": tuple(
            UnitShare(name=f"{EVIL}{k}", parameter_bytes=k, seconds=1.0, activation_bytes=1.0, boundary_bytes=1.0)
            for k in range(50)
        ),
        "scaling": (
            ScalingPoint(num_devices=1, layout="dp=1", predicted_seconds=0.02, measured_seconds=0.02),
            ScalingPoint(num_devices=2, layout="dp=2", predicted_seconds=0.01),
        ),
        "notes": (EVIL,),
    }
    return Comparison(**(fields | changes))  # type: ignore[arg-type]


EMPTY = {"results": (), "units": (), "scaling": (), "rejected": (), "notes": (), "best": "", "limit_bytes": None}


class Reader(HTMLParser):
    """Collect tags, links and text, and check that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_text_of_the_user_is_escaped() -> None:
    """A name with a tag in it is shown, not obeyed, wherever names occur."""
    reader = read(make_page(comparison()))
    assert "script" not in reader.tags
    assert reader.text.count('<script>alert("x")</script>') >= 5


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No script, no style sheet, no font, no picture, no address of another host."""
    page = make_page(comparison())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert [link for link in read(page).links if link != "data:,"] == []


def test_every_section_is_there() -> None:
    """Time, memory, timelines, predictions, scaling, units, what was not run, and facts each have a heading."""
    text = read(make_page(comparison())).text
    headings = ("Layouts", "time goes", "Memory", "on the clock", "beside measured", "More devices", "front to back")
    assert all(heading in text for heading in (*headings, "Not run", "What was compared"))
    assert "9.1 GiB of 8.0 GiB" in text


def test_a_layout_that_failed_is_shown_with_its_error() -> None:
    """It says 'not run' and the error, and has no measured bar."""
    reader = read(make_page(comparison(results=(result("pp=2", 0.02, error="rank 1: out of memory"),), best="")))
    assert "not run" in reader.text and "rank 1: out of memory" in reader.text


def test_an_empty_comparison_makes_a_page() -> None:
    """Where nothing was measured and nothing is known, the page still says what was asked."""
    assert "2 cores" in read(make_page(comparison(**EMPTY))).text


def test_pictures_are_written_and_linked(tmp_path: Path) -> None:
    """Each picture comes as SVG and PNG, and the page offers those that lie beside it."""
    written = write_pictures(comparison(), tmp_path)
    assert len(written) == 12 and all(path.stat().st_size > 1000 for path in written)
    links = read(write_page(comparison(), tmp_path).read_text()).links
    assert {path.name for path in written} <= set(links)


def test_an_empty_comparison_has_no_pictures(tmp_path: Path) -> None:
    """Nothing is drawn of nothing."""
    assert write_pictures(comparison(**EMPTY), tmp_path) == []


def test_many_units_become_few_rows() -> None:
    """Neighbours are put together, and shares still add up."""
    rows = unit_rows(comparison().units, most=12)
    assert len(rows) <= 12
    assert sum(r.time_share for r in rows) == pytest.approx(1.0)
    assert sum(r.parameter_share for r in rows) == pytest.approx(1.0)


def test_a_comparison_reads_well_in_eighty_columns() -> None:
    """The terminal's table fits, names the best, and shows markup of the user's as it is."""
    out = io.StringIO()
    show_comparison(comparison(job="[bold]x[/bold]", units=()), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert "[bold]x[/bold]" in out.getvalue() and "Take dp=2" in out.getvalue()
    assert all(len(line) <= 80 for line in lines if line.startswith(("layout", "dp=", "pp=")))


def test_a_plan_is_shown_and_survives_json() -> None:
    """Its advice comes first; what was rejected, with the numbers, last; as JSON and back it is the same."""
    memory = RankMemory(parts={"parameters": 5 * MIB}, reserved=6 * MIB)
    estimate = Estimate(seconds=0.01, time_parts={"compute": 0.01}, memory=(memory, memory))
    chosen = Candidate(layout=Layout(pp=2), microbatch_size=8, cuts=(1,), estimate=estimate, stages=("a", "b"))
    plan = Plan(
        job="j",
        cluster="here",
        num_devices=2,
        batch_size=64,
        chosen=chosen,
        rejected=(Rejection(layout="dp=2", reason="9 GiB of 8 GiB on every rank"),),
        advice=("Take pp=2.",),
    )
    out = io.StringIO()
    show_plan(plan, Console(file=out, width=100))
    text = out.getvalue()
    assert text.index("Take pp=2.") < text.index("9 GiB of 8 GiB")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# ---- what was measured ---------------------------------------------------------------------------------


def test_waits_are_parted_by_when_the_sender_had_sent() -> None:
    """A wait before the message was sent is bubble, after that communication; all parts add up to the step."""
    send, receive = Action(Op.SEND_ACTIVATION, 0, 0), Action(Op.RECEIVE_ACTIVATION, 1, 0)
    first = [(Action(Op.FORWARD, 0, 0), 0.0, 3.0), (send, 3.0, 4.0)]
    second = [(receive, 0.0, 5.0), (Action(Op.FORWARD, 1, 0), 5.0, 9.0), (Action(Op.UPDATE), 9.0, 10.0)]
    parts = measured_parts([first, second], Layout(pp=2), 20.0)
    assert sum(parts.values()) == pytest.approx(20.0)
    assert parts["bubble"] == pytest.approx(8.0)  # 4 of 10 seconds
    assert parts["communication"] == pytest.approx(2.0)
    assert parts["compute"] == pytest.approx(8.0)
    assert parts["optimizer"] == pytest.approx(2.0)


def test_bars_begin_at_zero_and_data_is_no_computing() -> None:
    """The first bar starts the clock; a forward begins once its data is there."""
    spans = [[(None, 7.0, 7.5), (Action(Op.FORWARD, 0, 0), 7.0, 9.0)]]
    bars = bars_of(spans)
    assert [(b.kind, b.start, b.end) for b in bars] == [("load", 0.0, 0.5), ("F", 0.5, 2.0)]
