"""The page of a plan: the data in it are the plan's, no name in it is read as HTML, and in a browser it works."""

import base64
import dataclasses
import gzip
import hashlib
import html.parser
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import memonger
from memonger.plan_file import ChunkedBand
from memonger.report.page import page
from memonger.report.view import View
from tests.support.browser import Page, browser, needs_browser
from tests.support.command_line import invoke
from tests.support.planning_models import LOSS, chain

NASTY = "</script><img src=x onerror=alert(1)>\"'&amp;`${x}\u202e\x07\\ 名前"


def _nasty() -> memonger.Plan:
    """A plan in which every name tries to be more than a name."""
    names = iter(f"{number}{NASTY}" for number in itertools.count())
    values = list(itertools.islice(names, 4))
    nodes = [helper.make_node("Relu", [a], [b], name=next(names)) for a, b in itertools.pairwise(values)]
    ends = [helper.make_tensor_value_info(values[at], TensorProto.FLOAT, [8, 8]) for at in (0, -1)]
    graph = helper.make_graph(nodes, next(names), ends[:1], ends[1:])
    return memonger.search_plan(helper.make_model(graph, ir_version=10), mode="inference", device="none")


class _Parts(html.parser.HTMLParser):
    """Elements of a page, with the text of those that hold no others."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1][0] if self.tags else "", []).append(data)


def _data(drawn: bytes) -> dict[str, Any]:
    found = re.search(r'id="data">([^<]*)</script>', drawn.decode())
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_data_in_the_page_are_the_plans(training: memonger.Plan) -> None:
    data, graph = _data(page(View("chain", training))), training.graph
    columns, steps = data["rectangles"], data["steps"]
    assert steps["node"] == list(graph.nodes)
    assert [steps["operators"][number] for number in steps["operator"]] == list(graph.ops)
    number = {name: value for value, name in enumerate(graph.values)}
    kinds = [kind["name"] for kind in data["kinds"]]
    in_arena = [i for i, kind in enumerate(columns["kind"]) if kinds[kind] not in ("workspace", "input", "weight")]
    buffers = {
        (training.offsets[training.storage.of_value.index(b.id)], b.size, b.start, b.stop)
        for b in training.storage.buffers
    }
    assert {tuple(columns[key][i] for key in ("offset", "bytes", "start", "stop")) for i in in_arena} == buffers
    assert len(in_arena) == len(training.storage.buffers)
    for i in in_arena:
        name = columns["name"][i] or steps["node"][columns["start"][i]]
        assert training.offsets[number[name]] == columns["offset"][i]
    assert data["plan"]["total_bytes"] == training.total_bytes
    assert max(data["before"]["bytes"]) == training.peak_before_bytes
    assert len(data["candidates"]) == len(training.outcome.candidates) > 1
    assert page(View("chain", training)) == page(View("chain", training))
    assert _data(page(View("chain", training), measured={"peak_bytes": math.nan}))["measured"]["peak_bytes"] is None


def test_names_are_never_read_as_html_and_the_page_loads_nothing() -> None:
    drawn = page(View(NASTY, _nasty())).decode()
    parts = _Parts(drawn)
    tags = [tag for tag, _ in parts.tags]
    assert tags.count("script") == 2
    assert tags.count("img") == 0
    assert "\x07" not in drawn
    assert "\u202e" not in drawn
    assert NASTY.split("\u202e")[0] in "".join(parts.texts["h1"])
    assert not [attributes for _, attributes in parts.tags if {"src", "href", "onerror"} & attributes.keys()]
    assert not re.findall(r"https?:", drawn.replace("http://www.w3.org/2000/svg", ""))
    policy = next(str(each["content"]) for _, each in parts.tags if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", drawn, re.DOTALL)[-1]
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert _data(drawn.encode())["title"].startswith("</script>")


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(chain(), "chain.onnx")
    common = ["--loss", LOSS, "--device", "none", "--quiet"]
    _invoke("plan", "chain.onnx", *common, "-o", "planned.onnx", "--report", "made.html")
    made = _data(Path("made.html").read_bytes())
    plans = [_invoke("plan", "chain.onnx", *common, "--strategy", strategy, "--json") for strategy in ("none", "cheap")]
    Path("frontier.json").write_text(f"[{','.join(plans)}]")  # as `memonger pareto` prints them
    run = {"peak_bytes": 5, "latency_seconds": 0.1, "stock_session": {"peak_bytes": 7}, "else": []}
    Path("run.json").write_text(json.dumps(run))
    given = ["--frontier", "frontier.json", "--measured", "run.json"]
    assert "open" in _invoke("report", "planned.onnx", "-o", "read.html", *given).lower()
    read = _data(Path("read.html").read_bytes())
    assert made["candidates"]
    assert made["rectangles"] == read["rectangles"]
    assert read["candidates"] == []
    assert [point["peak_bytes"] for point in read["frontier"]] == [json.loads(plan)["peak_bytes"] for plan in plans]
    assert read["measured"]["stock_session"]["peak_bytes"] == 7
    assert read["measured"]["default_session"] is None


def _invoke(*arguments: str, status: int = 0) -> str:
    result = invoke(*arguments)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ("[]", ("--measured", "file.json"), "file.json isn't what memonger run --compare --json prints"),
        ('[{"peak_bytes": "a"}]', ("--frontier", "file.json"), "file.json isn't what memonger pareto --json prints"),
        ("\0", ("--frontier", "file.json"), "file.json isn't valid JSON"),
        ("{}", ("--measured", "file.json", "--format", "perfetto"), "are shown by format 'html', not by 'perfetto'"),
        ("{}", ("--measured", "missing.json"), "missing.json: No such file"),
    ],
)
def test_files_of_another_kind_are_refused(
    content: str, arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _nasty().save("planned.onnx")
    Path("file.json").write_text(content)
    assert says in _invoke("report", "planned.onnx", "-o", "out", *arguments, status=1)
    assert not Path("out").exists()


def test_a_picture_is_drawn_by_its_name(training: memonger.Plan, tmp_path: Path) -> None:
    training.plot(tmp_path / "plan.png", title="$\\frac{</svg>&")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    training.plot(tmp_path / "plan.svg", title="</svg>&")
    assert "</svg>&" not in (tmp_path / "plan.svg").read_text().split("</svg>")[0]
    with pytest.raises(memonger.PlanError, match=r"\.svg, \.png or \.pdf"):
        training.plot(tmp_path / "plan.xyz")
    with pytest.raises(memonger.PlanError, match="no format of a report"):
        training.report(tmp_path / "plan", format="xyz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.png", "plan.svg"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser, one for all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@needs_browser
def test_in_a_browser_a_tensor_is_found_shown_and_left_again(
    shown: Page, training: memonger.Plan, tmp_path: Path
) -> None:
    training.report(tmp_path / "plan.html")
    shown.open(tmp_path / "plan.html")
    assert shown.requests == [(tmp_path / "plan.html").as_uri()]
    shown.key("/")
    for letter in "relu5":
        shown.key(letter)
    found = {n for n in training.graph.values if "relu5" in n and training.graph.values.index(n) in training.offsets}
    number = int(re.match(r"\d+", shown.text("#found"))[0])  # type: ignore[index]
    assert 0 < number <= len(found)
    shown.key("Enter")
    details = shown.text("#details")
    assert "relu5" in details
    shown.key("Escape")
    assert "Point at a rectangle" in shown.text("#details")
    assert shown.text("#found") == ""
    assert shown.errors == []


@needs_browser
def test_in_a_browser_the_map_has_every_rectangle_where_it_lies(
    shown: Page, training: memonger.Plan, tmp_path: Path
) -> None:
    view = View("chain", training)
    training.report(tmp_path / "plan.html")
    shown.open(tmp_path / "plan.html")
    shown.run("document.getElementById('map').scrollIntoView({block: 'center'})")
    box = shown.run("(() => { const b = document.getElementById('map').getBoundingClientRect();"
                    " return [b.left, b.top, b.width, b.height]; })()")  # fmt: skip
    left, top, width, height = box[0] + 76, box[1], box[2] - 76, box[3] - 96  # less what is beside and below the map
    high = training.arena_bytes + (training.workspace_bytes or 0)
    for each in sorted(view.arena, key=lambda one: -one.size * (one.stop - one.start))[:8]:
        x = left + width * (each.start + each.stop) / 2 / len(view.steps)
        y = top + height * (1 - (each.offset + each.size / 2) / high)
        shown.click(x, y)
        details = shown.text("#details")
        assert details.startswith(each.name)
        assert f"{each.offset:,}" in details
        assert f"{each.start} to {each.stop - 1}" in details
    shown.key("Escape")


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_text_of_curves_is_as_large_on_a_phone(
    shown: Page, training: memonger.Plan, tmp_path: Path, width: int
) -> None:
    training.report(tmp_path / "plan.html")
    shown.open(tmp_path / "plan.html", width)
    heights = shown.run("[...document.querySelectorAll('#curve text')].map(one => one.getBoundingClientRect().height)")
    assert min(heights) >= 11
    assert shown.run("document.querySelector('#curve svg').getBoundingClientRect().right") <= width


@needs_browser
def test_in_a_browser_keys_zoom_and_go_from_one_to_the_next(
    shown: Page, training: memonger.Plan, tmp_path: Path
) -> None:
    training.report(tmp_path / "plan.html")
    shown.open(tmp_path / "plan.html")
    shown.run("document.getElementById('map').focus()")
    before = _pixels(shown)
    shown.key("+")
    assert _pixels(shown) != before
    shown.key("0")
    assert _pixels(shown) == before
    shown.key("ArrowLeft")
    assert _pixels(shown) != before
    shown.key("0")
    names = [each.name for each in View("chain", training).rectangles]
    for name in names[:3]:
        shown.key("n")
        assert shown.text("#details b") == name
    shown.key("p")
    assert shown.text("#details b") == names[1]
    shown.key("Escape")
    light = shown.run("getComputedStyle(document.body).backgroundColor")
    shown.run("document.getElementById('theme').click()")
    assert shown.run("getComputedStyle(document.body).backgroundColor") != light
    assert _pixels(shown) != before
    assert shown.errors == []


def _pixels(shown: Page) -> str:
    return shown.run(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(document.getElementById('map').toDataURL()))))"
    )


@needs_browser
def test_in_a_browser_nasty_names_are_only_text(shown: Page, tmp_path: Path) -> None:
    plan = _nasty()
    plan.report(tmp_path / "plan.html", title=NASTY)
    shown.errors.clear()
    shown.open(tmp_path / "plan.html")
    assert shown.run("document.querySelectorAll('img, iframe, object').length") == 0
    shown.run("document.getElementById('map').focus()")
    shown.key("n")
    assert memonger.units.shown(plan.graph.values[plan.graph.writes[0][0]]) in shown.text("#details")
    assert "</script>" in shown.text("#largest")
    assert "values of the forward pass" in shown.text("#counted")
    assert shown.errors == []


@needs_browser
def test_in_a_browser_chunks_are_listed_where_there_are_some(
    shown: Page, training: memonger.Plan, tmp_path: Path
) -> None:
    band = ChunkedBand(0, "relu1", "relu5", 5, (4, 2), 20, 4096, 1024, 0.001)
    for chunks in ((), (band,)):
        made = dataclasses.replace(training, chunks=chunks)
        made.report(tmp_path / "plan.html")
        shown.open(tmp_path / "plan.html")
        assert shown.run("document.getElementById('chunks').hidden") is not bool(chunks)
    text = shown.text("#chunks")
    assert all(word in text for word in ("relu1", "relu5", "the batch", "4, 2", "4.00 KiB", "1.00 KiB", "1.00 ms"))
    assert "run in chunks of the batch, in 4, then 2 slices" in shown.text("#summary")
    assert shown.errors == []
