"""The networks and the page of benchmarks.planning.seeds."""

import pytest

import memonger
from benchmarks.planning import seeds
from models import optnet


@pytest.mark.parametrize("name", optnet.NETWORKS)
def test_the_networks_take_what_optnet_counted(name: str) -> None:
    model = optnet.as_double(optnet.build(name, 1))
    count = memonger.count_memory(model, mode="inference")
    graph = memonger.search_plan(model, mode="inference", device="none", order="file").graph
    own = optnet.unplanned_outputs(model, dict(zip(graph.values, graph.sizes, strict=True)))
    published, _ = seeds.INFERENCE["batch 1, double"][name]
    assert own / seeds.MIB == pytest.approx(published, abs=0.6)
    assert own < count.before.outputs


def test_a_table_replaces_the_one_that_stands_there() -> None:
    page = "# Page\n\n<!-- one -->\n| a |\n|---|\n| 1 |\n\nText.\n\n<!-- two -->\n\n"
    for name in ("one", "two"):
        page = seeds._replaced(page, name, ["| b |"])
    assert page == "# Page\n\n<!-- one -->\n| b |\n\nText.\n\n<!-- two -->\n| b |\n\n"
    with pytest.raises(SystemExit, match="three"):
        seeds._replaced(page, "three", [])


def test_the_page_has_a_place_for_every_table() -> None:
    text = seeds.PAGE.read_text(encoding="utf-8")
    for name, head, _ in seeds.TABLES:
        assert f"<!-- {name} -->\n| {head.split('|')[0].strip()} |" in text
