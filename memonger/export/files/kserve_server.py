"""KServe: a predictor that holds a memonger.Session. ``python server.py``"""

import argparse
import json
import uuid
from pathlib import Path
from typing import Any

import kserve
from kserve.errors import InvalidInput

from memonger.errors import SessionError
from memonger.export.protocol import message, read_inputs, write_outputs
from memonger.export.serving import PlannedModel

HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "memonger.json").read_text())


class Planned(kserve.Model):
    """The model, under the name the server was given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.load()

    def load(self) -> bool:
        """Load the plans."""
        self.model = PlannedModel([HERE / name for name in SETTINGS["plans"]])
        self.ready = True
        return self.ready

    def predict(self, payload: kserve.InferRequest, headers: object = None) -> kserve.InferResponse:
        """Answer one request."""
        try:
            answers = write_outputs(self.model.run(read_inputs([_fields(tensor) for tensor in payload.inputs])))
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    arguments, _ = parser.parse_known_args()
    kserve.ModelServer().start([Planned(arguments.model_name if arguments.model_name != "model" else SETTINGS["name"])])
