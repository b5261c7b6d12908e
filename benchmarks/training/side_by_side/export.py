"""Writes a network for all contestants: ``python -m benchmarks.training.side_by_side.export NETWORK SIZE FOLDER``.

PyTorch's weights (weights.pt), the same network with them as ONNX in inference form with a symbolic batch
(forward.onnx), and their sizes (figures.json, written last). SIZE is a `networks.Size` as JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.training.side_by_side import networks
from memonger.runtime.worker import reason, say
from models.torch_exports import export_module
from models.torch_networks import initialized

TELLING = 1e-3  # outputs of two inputs are apart by at least this part of the largest


def export(name: str, size: networks.Size, folder: Path, training: bool = False) -> None:
    """Write the network's files.

    Args:
        name: Of `networks.NETWORKS`.
        size: Its options and its samples' shape.
        folder: Where they go.
        training: Whether to export what the module's code does only in training, such as stochastic depth.

    Raises:
        ValueError: its outputs don't depend on its inputs: comparing them could not fail.
    """
    network = networks.NETWORKS[name]
    batches = [torch.from_numpy(networks.data(network, size, 2, seed)["x"]) for seed in (1, 2, 3)]
    module = initialized(name, batches[0], **size.options).eval()
    with torch.no_grad():
        one, other = (module(x).numpy() for x in batches[1:])
    if np.abs(one - other).max() < TELLING * np.abs(one).max():
        raise ValueError(f"{name} gives about the same outputs for any input")
    torch.save(module.state_dict(), folder / "weights.pt")
    module.train(training)
    export_module(module, (batches[0],), folder / "forward.onnx", input_names=["x"], output_names=["scores"])
    weights = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    figures = {
        "weight_bytes": sum(tensor.nbytes for tensor in weights),
        "state_bytes": sum(tensor.nbytes for tensor in module.parameters()),
        "parameters": sum(tensor.numel() for tensor in module.parameters()),
    }
    (folder / "figures.json").write_text(json.dumps(figures))


def main() -> None:
    """Export one network and say so."""
    name, size, folder = sys.argv[1:]
    try:
        export(name, networks.Size(**json.loads(size)), Path(folder))
        say({"exported": name})
    except Exception as error:  # the row's contestants all fail for it
        say({"failed": reason(error)})


if __name__ == "__main__":
    main()
