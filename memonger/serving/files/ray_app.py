"""Ray Serve: every replica holds a memonger.Fleet. ``serve run app:app``"""

import json
import re
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import metrics
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memonger.errors import BusyError, SessionError
from memonger.serving.protocol import message, read_request, write_body
from memonger.serving.serving import PlannedFleet, UnknownModelError

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "memonger.json").read_text())


@serve.deployment(
    name=SETTINGS["name"],
    num_replicas=SETTINGS["instances"],
    max_ongoing_requests=SETTINGS["arenas"] + 100,  # those that have no arena wait in the replica, which counts them
    ray_actor_options={"num_cpus": 1, "memory": SETTINGS["request_bytes"]},
)
class Replica:
    """Answers requests from one fleet."""

    def __init__(self, folder: str) -> None:
        self.fleet = PlannedFleet.load(Path(folder) / "memonger.json")
        self.fleet.report_to(_metric)

    async def __call__(self, request: Request) -> Response:
        """Answer one request: to /v2/models/NAME/infer, or to / where there is one model."""
        try:
            feeds = read_request(await request.body())
            body = write_body(await self.fleet.run(feeds, _name_in(request.url.path)))
        except SessionError as error:
            status = 503 if isinstance(error, BusyError) else 404 if isinstance(error, UnknownModelError) else 400
            return JSONResponse({"error": message(error)}, status_code=status)
        return Response(body, media_type="application/json")

    async def run(self, inputs: dict[str, Any], name: str | None = None) -> dict[str, Any]:
        """Run a model from another deployment: ``await handle.run.remote({"x": array}, "NAME")``."""
        return await self.fleet.run(inputs, name)


def _name_in(path: str) -> str | None:
    """The model that a path names, if it names one."""
    named = re.search(r"/v2/models/([^/]+)/infer$", path)
    return named[1] if named else None


def _metric(figure: Any) -> Any:
    """A metric of Ray for a figure of the fleet."""
    labels = (figure.label,) if figure.label else ()
    made = (metrics.Counter if figure.is_counter else metrics.Gauge)(figure.name, figure.about, labels)

    def grow(key: str, value: float, more: float) -> None:
        tags = {figure.label: key} if labels else {}
        if not figure.is_counter:
            made.set(value, tags)
        elif more > 0:
            made.inc(more, tags)

    return grow


app = Replica.bind(str(HERE))
