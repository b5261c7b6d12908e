"""How large the pages of reports are, and how fast in a browser: ``python -m benchmarks.planning.report_page``.

Writes report_page.txt; with ``--pictures FOLDER`` also what was seen. Each page is opened in Chromium without a window
and without a graphics card, from the disk. Painted is the browser's own first contentful paint, map the moment the map
of the arena was drawn, both from the start of loading. A frame is the time between two of them while the wheel is
turned, 60 steps in and 60 out: 16.7 ms where the page keeps up with the screen.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import memonger
import models
from benchmarks.machine import Table, keep, stamp
from memonger.report.view import View
from tests.support.browser import Page, browser

SGD = memonger.SGD(lr=0.1, momentum=0.9)
CASES = {
    "resnet50, batch 8, 600 MiB": ("resnet50", 8, {}, {"budget": "600MiB"}),
    "gpt, batch 8": ("gpt", 8, {}, {}),
    "resnet1001, batch 2": ("resnet1001", 2, {}, {}),
    "resnet 2000, nothing shared": (
        "resnet1001", 1, {"depth": 2000, "image": 8}, {
            "device": "none", "strategy": "none", "order": "file",
            "sharing": memonger.Sharing(inplace=False, views=False),
        },
    ),
}  # fmt: skip
TABLE = Table(
    "plan<28", "steps>8d", "rectangles>12d", "KiB>8.0f", "write s>9.2f", "painted s>11.2f", "map s>8.2f",
    "frame ms>10.1f", "slowest 5 %>13.1f",
)  # fmt: skip

_ZOOM = """(async () => {
  const map = document.getElementById("map"), box = map.getBoundingClientRect(), times = [];
  const where = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 3, cancelable: true};
  for (let turn = 0, last = performance.now(); turn < 120; turn++) {
    map.dispatchEvent(new WheelEvent("wheel", {deltaY: turn < 60 ? -60 : 60, ...where}));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times;
})()"""
_LOADED = """(async () => {
  const when = (name) => performance.getEntriesByName(name)[0]?.startTime;
  while (!when("first-contentful-paint")) await new Promise((done) => setTimeout(done, 20));
  return [when("first-contentful-paint"), when("map drawn")];
})()"""


def measured(name: str, shown: Page, folder: Path, pictures: Path | None) -> tuple[object, ...]:
    """A row of the table."""
    network, batch, options, planning = CASES[name]
    model = models.build(network, batch=batch, training=True, **options)
    view = View(name, memonger.search_plan(model, loss="loss", optimizer=SGD, **planning))
    path = folder / f"{network}{batch}.html"
    begin = time.perf_counter()
    view.plan.report(path, title=name)
    seconds = time.perf_counter() - begin
    shown.open(path, 1400, 1000)
    painted, drawn = shown.run(_LOADED)
    if pictures is not None:
        shown.screenshot(pictures / f"{network}{batch}.png")
    frames = sorted(shown.run(_ZOOM))
    slow = frames[round(0.95 * len(frames))]
    figures = (path.stat().st_size / 1024, seconds, painted / 1e3, drawn / 1e3, statistics.median(frames), slow)
    return (name, len(view.steps), len(view.rectangles), *figures)


def table(pictures: Path | None) -> Iterator[str]:
    """The table's lines."""
    yield from stamp("planning.report_page", ("memonger", "onnx"))
    yield TABLE.heading
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder)) as shown:
        version = shown.call("Browser.getVersion")["product"]
        for name in CASES:
            yield TABLE.row(*measured(name, shown, Path(folder), pictures))
    yield f"in {version}, window of 1400 by 1000"


def main() -> None:
    """Measure and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="a folder for screenshots")
    keep(table(parser.parse_args().pictures), Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
