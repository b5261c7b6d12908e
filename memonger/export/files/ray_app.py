"""Ray Serve: every replica holds a memonger.Session. ``serve run app:app``"""

import asyncio
import json
from pathlib import Path

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memonger.errors import SessionError
from memonger.export.protocol import message, read_request, write_body
from memonger.export.serving import PlannedModel

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "memonger.json").read_text())


@serve.deployment(
    name=SETTINGS["name"],
    num_replicas=SETTINGS["instances"],
    ray_actor_options={"num_cpus": 1, "memory": SETTINGS["request_bytes"]},
)
class Planned:
    """One replica."""

    def __init__(self, folder: str) -> None:
        self.model = PlannedModel([Path(folder) / name for name in SETTINGS["plans"]])

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        try:
            feeds = read_request(await request.body())
            body = write_body(await asyncio.to_thread(self.model.run, feeds))
        except SessionError as error:
            return JSONResponse({"error": message(error)}, status_code=400)
        return Response(body, media_type="application/json")


app = Planned.bind(str(HERE))
