"""BentoML: every worker holds a memonger.Session. ``bentoml serve service:PlannedService``"""

import json
from pathlib import Path
from typing import Any

import bentoml

from memonger.errors import SessionError
from memonger.export.protocol import message, read_inputs, write_outputs
from memonger.export.serving import PlannedModel

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "memonger.json").read_text())


@bentoml.service(
    name=SETTINGS["name"],
    workers=SETTINGS["instances"],
    resources={"memory": f"{SETTINGS['request_bytes'] >> 20}Mi"},
)
class PlannedService:
    """One worker."""

    def __init__(self) -> None:
        self.model = PlannedModel([HERE / name for name in SETTINGS["plans"]])

    @bentoml.api
    def infer(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer one request."""
        try:
            return {"outputs": write_outputs(self.model.run(read_inputs(inputs)))}
        except SessionError as error:
            raise bentoml.exceptions.InvalidArgument(message(error)) from error
