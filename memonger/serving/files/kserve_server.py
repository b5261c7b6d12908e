"""KServe: a predictor that holds a memonger.Fleet, each of its models under its name. ``python server.py``"""

import argparse
import uuid
from pathlib import Path
from typing import Any

import kserve
from kserve.errors import InvalidInput, ServerNotReady

from memonger.errors import BusyError, SessionError
from memonger.serving.protocol import message, read_inputs, write_outputs
from memonger.serving.serving import PlannedFleet, prometheus

SETTINGS = Path(__file__).resolve().parent / "memonger.json"


class BusyServer(ServerNotReady):
    """The answer "try again later": status 503."""

    def __init__(self, error: BusyError) -> None:
        self.error_msg = message(error)


class FleetMember(kserve.Model):
    """A model of the fleet."""

    def __init__(self, name: str, fleet: PlannedFleet, planned: str) -> None:
        super().__init__(name)
        self.fleet, self.planned, self.ready = fleet, planned, True

    def get_input_types(self) -> list[dict[str, Any]]:
        """What requests give, for those who ask at ``/v2/models/NAME``."""
        return self.fleet.model(self.planned).inputs

    def get_output_types(self) -> list[dict[str, Any]]:
        """What answers hold, likewise."""
        return self.fleet.model(self.planned).outputs

    async def predict(self, payload: kserve.InferRequest, headers: object = None) -> kserve.InferResponse:
        """Answer one request."""
        if not isinstance(payload, kserve.InferRequest):
            raise InvalidInput(f"requests are of the Open Inference Protocol: POST /v2/models/{self.name}/infer")
        try:
            feeds = read_inputs([_fields(tensor) for tensor in payload.inputs])
            answers = write_outputs(await self.fleet.run(feeds, self.planned))
        except BusyError as error:
            raise BusyServer(error) from error
        except SessionError as error:
            raise InvalidInput(message(error)) from error
        outputs = [kserve.InferOutput(**tensor) for tensor in answers]
        return kserve.InferResponse(
            response_id=payload.id or str(uuid.uuid4()), model_name=self.name, infer_outputs=outputs
        )


def _fields(tensor: kserve.InferInput) -> dict[str, Any]:
    """An input as the protocol has it; what came as bytes as an array."""
    try:
        data = tensor.data if isinstance(tensor.data, list) else tensor.as_numpy()
    except ValueError as error:
        raise SessionError(f"input '{tensor.name}' can't be read: {error}") from error
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": data}


def models(name: str | None) -> list[FleetMember]:
    """The models to serve; a single one under another name if one is given."""
    fleet = PlannedFleet.load(SETTINGS)
    fleet.report_to(prometheus)
    if len(fleet.names) == 1:
        return [FleetMember(name or fleet.names[0], fleet, fleet.names[0])]
    return [FleetMember(one, fleet, one) for one in fleet.names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    arguments, _ = parser.parse_known_args()
    kserve.ModelServer().start(models(arguments.model_name if arguments.model_name != "model" else None))
