"""Fine-tuning a BERT-like classifier beside PyTorch on the CPU: ``python -m benchmarks.finetune``.

Images of scikit-learn's handwritten digits are sentences: the numbers of their 31 brightest pixels. PyTorch trains a
small BERT (of the package transformers) on the digits 0 to 4; then all of it, its head alone, or adapters and the head
are trained on 5 to 9, with AdamW from the same weights on the same batches: in PyTorch, and as memonger's plans. Each
contestant is a process of its own, and those of a group of rows take turns. Memory is what a process grew by over what
it had, batches included, before the network was made; at most during the steps after the first two. ``--threads N``
(2): of each.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.machine import HERE, MIB, Table, keep, stamp
from memonger.cli.worker import Worker, reason, say, serve
from memonger.runtime import process_memory

BATCH, LENGTH, RATE, RANK, ALPHA = 32, 32, 1e-3, 8, 16.0
BEFORE, WARM, TURNS = 100, 2, 4
STEPS = {"all": 400, "head": 1600, "adapters": 1600}  # until little more is learnt
HEAD, ADAPTED = ("*classifier*", "*pooler*"), ("*query.weight", "*value.weight")
SETTINGS = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 65,
    "max_position_embeddings": LENGTH, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TABLE = Table(
    "trained<10", "contestant<18", "steps>6", "parameters>12,", "predicted MiB>15.1f", "grew by MiB>13.1f",
    "ms a step>11.1f", "of PyTorch's>14.2f", "last losses>13.4f", "accuracy>10.1%", "loss apart by>15.1e",
    missing="-",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What a measuring process trains.

    Attributes:
        library: ``torch`` or ``memonger``.
        trained: ``all``, ``head`` or ``adapters``.
        folder: Where data, weights and plans are.
        threads: Within a node.
        plan: Name of the planned file.
    """

    library: str
    trained: str
    folder: str
    threads: int
    plan: str = ""


def network() -> Any:
    """The classifier, tokens → scores, in PyTorch."""
    from benchmarks.torch_models import Transformers

    return Transformers("Bert", "SequenceClassification", **SETTINGS)


def sentences() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Digits as tokens with their labels: 0 to 4; 5 to 9 to train with; and a fourth of those to test with."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    brightest = np.argsort(-x, 1, kind="stable")[:, : LENGTH - 1]
    tokens = np.concatenate([np.full((len(x), 1), x.shape[1]), brightest], 1)  # a word of its own begins each
    order = np.random.default_rng(0).permutation(len(x))
    tokens, labels = tokens[order], y[order].astype(np.int64)
    new = labels >= 5
    test = np.cumsum(new) % 4 == 0
    parts = (~new, new & ~test, new & test)
    return tuple({"x": tokens[part], "labels": labels[part] % 5} for part in parts)  # type: ignore[return-value]


def batches(data: Mapping[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    """That many batches, drawn the same for all."""
    generator = np.random.default_rng(1)
    for _ in range(count):
        chosen = generator.choice(len(data["labels"]), BATCH, replace=False)
        yield {name: array[chosen] for name, array in data.items()}


def prepare(folder: Path, threads: int) -> list[str]:
    """Train on the first digits, export, and plan. Returns the plans' names."""
    import torch

    import memonger

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    first, train, test = sentences()
    for name, data in (("train", train), ("test", test)):
        np.savez(folder / f"{name}.npz", **data)
    module, example = network().train(), torch.from_numpy(train["x"][:BATCH])
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    for feeds in batches(first, BEFORE):
        _torch_step(module, optimizer, feeds)
    torch.save(module.state_dict(), folder / "weights.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        model = memonger.from_torch(module.eval(), example, input_names=["x"], output_names=["scores"])
    adapted = memonger.add_lora(model, RANK, ADAPTED, alpha=ALPHA)
    tensors = {
        n: v.const_value.numpy() for n, v in adapted.graph.initializers.items() if ".lora_" in n and v.const_value
    }
    np.savez(folder / "adapters.npz", **tensors)
    ways: dict[str, tuple[Any, dict[str, Any], int]] = {
        "all": (model, {}, 32), "all, 8 bits": (model, {}, 8), "head": (model, {"wrt": HEAD}, 32),
        "adapters": (adapted, {"wrt": ("*.lora_?", *HEAD)}, 32),
    }  # fmt: skip
    for name, (source, options, bits) in ways.items():
        step = memonger.differentiate(
            source, loss="softmax_cross_entropy", optimizer=memonger.AdamW(RATE, bits=bits), **options
        )
        memonger.search_plan(step, strategy="none", threads=threads).save(folder / f"{name}.onnx")
    return list(ways)


def _torch_step(module: Any, optimizer: Any, feeds: Mapping[str, np.ndarray]) -> float:
    import torch

    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(feeds["x"])), torch.from_numpy(feeds["labels"]))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


class TorchRunner:
    """PyTorch's contestant."""

    def __init__(self, job: Job) -> None:
        import torch

        torch.set_num_threads(job.threads)
        self.torch, self.module = torch, network()
        self.module.load_state_dict(torch.load(Path(job.folder) / "weights.pt", weights_only=True))
        self.module.train()
        if job.trained != "all":
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_("classifier" in name or "pooler" in name)
        if job.trained == "adapters":
            self._adapt(np.load(Path(job.folder) / "adapters.npz"))
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, RATE)

    def _adapt(self, tensors: Mapping[str, np.ndarray]) -> None:
        torch, nn = self.torch, self.torch.nn

        class Adapted(nn.Module):  # type: ignore[name-defined,misc]
            def __init__(self, inner: Any, a: np.ndarray, b: np.ndarray) -> None:
                super().__init__()
                self.inner, self.a, self.b = inner, *(nn.Parameter(torch.from_numpy(x)) for x in (a, b))

            def forward(self, x: Any) -> Any:
                return self.inner(x) + ALPHA / RANK * (x @ self.a @ self.b)

        for name in [name for name in tensors if name.endswith(".lora_A")]:
            path, _, leaf = name.removesuffix(".weight.lora_A").rpartition(".")
            parent = self.module.get_submodule(path)
            pair = (tensors[name], tensors[name.replace("lora_A", "lora_B")])
            setattr(parent, leaf, Adapted(getattr(parent, leaf), *pair))

    def step(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Train on a batch; returns its loss."""
        return _torch_step(self.module, self.optimizer, feeds)

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Of a batch."""
        with self.torch.inference_mode():
            return np.asarray(self.module.eval()(self.torch.from_numpy(x)))

    def parameters(self) -> int:
        """Elements that are trained."""
        return sum(parameter.numel() for parameter in self.trained)


class PlannedRunner:
    """memonger's contestant."""

    def __init__(self, job: Job) -> None:
        import memonger

        self.trainer = memonger.TrainingSession(Path(job.folder) / f"{job.plan}.onnx", intra_op_threads=job.threads)

    def step(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Train on a batch; returns its loss."""
        return self.trainer.step(dict(feeds))

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Of a batch."""
        return self.trainer.evaluate({"x": x}, pad=True)["scores"]

    def parameters(self) -> int:
        """Elements that are trained."""
        return sum(array.size for name, array in self.trainer.state_dict().items() if ".exp_avg" not in name)


def work(job: Job) -> None:
    """Serve one contestant: some steps an answer, and at the end what it can."""
    folder = Path(job.folder)
    if job.library == "torch":
        network()  # what it imports
    else:
        import onnxruntime  # noqa: F401

        import memonger.training_session  # noqa: F401
    with np.load(folder / "train.npz") as data:
        given = list(batches(dict(data), WARM + STEPS[job.trained]))
    before = process_memory.settle()
    runner: TorchRunner | PlannedRunner = TorchRunner(job) if job.library == "torch" else PlannedRunner(job)
    losses = [runner.step(feeds) for feeds in given[:WARM]]
    process_memory.settle()
    process_memory.reset_peak()
    say({"ready": True})

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["steps"]:
            times = []
            for feeds in given[len(losses) : len(losses) + request["steps"]]:
                begin = perf_counter()
                losses.append(runner.step(feeds))
                times.append(perf_counter() - begin)
            return {"times": times}
        grown = process_memory.resident().peak - before
        with np.load(folder / "test.npz") as test:
            x, labels = test["x"], test["labels"]
        found = np.concatenate([runner.scores(x[at : at + BATCH]).argmax(1) for at in range(0, len(x), BATCH)])
        accuracy = float(np.mean(found == labels))
        return {"grown": grown, "losses": losses, "accuracy": accuracy, "parameters": runner.parameters()}

    serve(answer)


def compete(jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    """Contestants taking turns; of each what it answers at the end, and the seconds of its steps."""
    with ExitStack() as stack:
        workers = []
        for number, job in enumerate(jobs):
            path = folder / f"job{number}.json"
            path.write_text(json.dumps(asdict(job)))
            worker = Worker("benchmarks.finetune", [str(path)], folder / f"errors{number}.txt")
            workers.append(stack.enter_context(worker))
            worker.read()
        times: list[list[float]] = [[] for _ in workers]
        for _ in range(TURNS):
            for worker, own in zip(workers, times, strict=True):
                own.extend(worker.ask({"steps": STEPS[jobs[0].trained] // TURNS})["times"])
        ends = [worker.ask({"steps": 0}) for worker in workers]
    return [{**end, "times": own} for end, own in zip(ends, times, strict=True)]


def rows(folder: Path, threads: int) -> Iterator[str]:
    """The table."""
    import memonger

    plans = prepare(folder, threads)
    yield from stamp(f"finetune --threads {threads}", ("torch", "transformers", "onnx", "onnxruntime"))
    yield (
        f"BERT of {SETTINGS['num_hidden_layers']} layers, width {SETTINGS['hidden_size']}, {LENGTH} tokens, batch "
        f"{BATCH}, AdamW, {threads} thread(s); adapters of rank {RANK} at queries and values"
    )
    yield TABLE.heading
    for trained in ("all", "head", "adapters"):
        names = [name for name in plans if name.partition(",")[0] == trained]
        jobs = [Job("torch", trained, str(folder), threads)]
        jobs += [Job("memonger", trained, str(folder), threads, name) for name in names]
        found = compete(jobs, folder)
        reference = found[0]
        for job, result in zip(jobs, found, strict=True):
            plan = memonger.Plan.load(folder / f"{job.plan}.onnx") if job.plan else None
            apart = np.abs(np.array(result["losses"]) / reference["losses"] - 1)[:20].max() if plan else None
            yield TABLE.row(
                trained if not plan else "", "PyTorch" if not plan else f"memonger{job.plan.removeprefix(trained)}",
                WARM + STEPS[trained], result["parameters"],
                (plan.total_bytes + (plan.session_bytes or 0)) / MIB if plan else None,
                result["grown"] / MIB,
                1e3 * median(result["times"]), median(result["times"]) / median(reference["times"]),
                float(np.mean(result["losses"][-10:])), result["accuracy"], apart,
            )  # fmt: skip
    yield "Predicted: arena, workspace, parameters, state, inputs, and what sessions hold beside them."
    yield "Loss apart: most over the first 20 steps, relative."


def main() -> None:
    """Measure, or serve a contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("job", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        try:
            work(Job(**json.loads(options.job.read_text())))
        except Exception as error:  # said to who measures
            say({"failed": reason(error)})
        return
    with tempfile.TemporaryDirectory() as folder:
        keep(rows(Path(folder), options.threads), HERE / "finetune.txt")


if __name__ == "__main__":
    main()
