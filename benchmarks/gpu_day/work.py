"""A stage's process: ``python -m benchmarks.gpu_day.work STAGE SETTINGS.json``; a line with an item gets a row."""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.stages import Settings
from benchmarks.training.side_by_side.job import load_cuda_libraries
from memonger.runtime.worker import reason, serve


def main() -> None:
    """Measure what is asked for."""
    stage, path = sys.argv[1:]
    settings = Settings(**json.loads(Path(path).read_text()))
    load_cuda_libraries()
    measure = importlib.import_module(f"benchmarks.gpu_day.{stage}").measure

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return measure(request["item"], settings, request["seconds"])
        except Exception as error:  # whatever it dies of is its row
            return {"failed": reason(error)}

    serve(answer)


if __name__ == "__main__":
    main()
