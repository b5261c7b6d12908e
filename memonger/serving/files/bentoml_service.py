"""BentoML: every worker holds a memonger.Fleet. ``bentoml serve service:PlannedService``"""

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

import bentoml

from memonger.errors import BusyError, SessionError
from memonger.serving.protocol import message, read_inputs, write_outputs
from memonger.serving.serving import PlannedFleet, UnknownModelError, prometheus

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "memonger.json").read_text())


class TooManyRequests(bentoml.exceptions.BentoMLException):
    """The answer "try again later": BentoML's own status for it is 429, and of one from 500 on it hides the message."""

    error_code = HTTPStatus.TOO_MANY_REQUESTS


@bentoml.service(
    name=SETTINGS["name"],
    workers=SETTINGS["instances"],
    resources={"memory": f"{SETTINGS['request_bytes'] >> 20}Mi"},
)
class PlannedService:
    """One worker."""

    def __init__(self) -> None:
        self.fleet = PlannedFleet.load(HERE / "memonger.json")
        self.fleet.report_to(prometheus)

    @bentoml.api
    async def infer(self, inputs: list[dict[str, Any]], model: str | None = None) -> dict[str, Any]:
        """Answer one request; where there is one model, it needn't be named."""
        try:
            return {"outputs": write_outputs(await self.fleet.run(read_inputs(inputs), model))}
        except UnknownModelError as error:
            raise bentoml.exceptions.NotFound(message(error)) from error
        except BusyError as error:
            raise TooManyRequests(message(error)) from error
        except SessionError as error:
            raise bentoml.exceptions.InvalidArgument(message(error)) from error
