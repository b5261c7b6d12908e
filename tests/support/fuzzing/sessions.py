"""Cases on sessions: state files, training metadata, and what callers hand to `run` and `step`."""

import base64
import copy
import functools
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import memonger
from memonger.ir import training_roles
from memonger.model import forward_model, parameters
from tests.support import training_models
from tests.support.fuzzing import compared, mutate
from tests.support.fuzzing.compared import Tell
from tests.support.fuzzing.outcomes import Wrong

ODD = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    2**70,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e39,
    -1e-3,
    "x",
    "",
    [],
    {},
)
Change = Callable[[random.Random, bytes], tuple[bytes, str]]

_FILES: dict[str, Path] = {}
"""Planned files that this process has made, by what they are."""


def _files() -> dict[str, Path]:
    """Plans of a training step, of the micro-batches before it, and of the two as one."""
    if not _FILES:
        folder = Path.cwd().parent.parent
        for name, accumulate in (("whole", "no"), ("last", "apply"), ("first", "add")):
            chosen = {"optimizer": memonger.SGD(lr=0.2, momentum=0.9), "accumulate": accumulate}
            training = memonger.differentiate(training_models.classifier(), loss="softmax_cross_entropy", **chosen)
            memonger.search_plan(training, device="none", threads=1).save(folder / f"{name}.onnx")
            _FILES[name] = folder / f"{name}.onnx"
    return _FILES


@functools.cache
def _plan(name: str) -> memonger.Plan:
    """A plan read from its file once: that is half of what a session on it costs."""
    return memonger.Plan.load(_files()[name])


def _trainer(micro: bool = False) -> memonger.TrainingSession:
    if micro:
        return memonger.TrainingSession(_plan("last"), accumulation=_plan("first"))
    return memonger.TrainingSession(_plan("whole"))


def _snapshot(trainer: memonger.TrainingSession) -> dict[str, Any]:
    about = {"steps": trainer.steps, "rate": trainer.learning_rate, "key": trainer.random_key}
    return {name: array.tobytes() for name, array in trainer.state_dict().items()} | about


def _check_unchanged(before: Mapping[str, Any], trainer: memonger.TrainingSession, what: str) -> None:
    after = _snapshot(trainer)
    changed = [name for name in before if before[name] != after[name] and before[name] == before[name]]
    if changed:
        raise Wrong(f"{what} was refused and changed the session's {'tensors' if len(changed) > 1 else changed[0]}")


def states(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """State files changed: refused and nothing changes, or the state that was saved."""
    tell(stage="run")
    trainer = _trainer()
    trainer.step(training_models.batch())
    trainer.save(folder / "good.state")
    saved = trainer.state_dict()
    trainer.step(training_models.batch(1))
    before = _snapshot(trainer)
    data, note = _change_state(choice, (folder / "good.state").read_bytes())
    tell(mutation=note, stage="load")
    if only_stock:
        return "alone"
    (folder / "bad.state").write_bytes(data)
    try:
        trainer.load(choice.choice([folder / "bad.state"] * 30 + [folder, folder / "none", "/dev/null", "a\0b"]))
    except memonger.MemongerError:
        _check_unchanged(before, trainer, "a state file")
        raise
    if any(array.tobytes() != saved[name].tobytes() for name, array in trainer.state_dict().items()):
        raise Wrong("a changed state file gives other tensors")
    _check_rate(trainer.learning_rate)
    return "right"


def _check_rate(rate: Any) -> None:
    """A learning rate that a session took is a number that float32 has, and not below zero."""
    with np.errstate(over="ignore"):
        if rate is not None and not 0 <= np.float32(rate) < np.inf:
            raise Wrong("a learning rate was taken that is infinite, not a number, or below zero")


def _change_state(choice: random.Random, data: bytes) -> tuple[bytes, str]:
    kinds: list[Change] = [mutate.spoil_bytes, _other_file, *[_tensors_header] * 4]
    return choice.choice(kinds)(choice, data)


def _other_file(choice: random.Random, data: bytes) -> tuple[bytes, str]:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3))
    odd = {
        "empty": b"",
        "npz": file.getvalue(),
        "model": _files()["whole"].read_bytes(),
        "twice": data * 2,
        "zeros": bytes(99),
    }
    odd |= {"behind": choice.randbytes(99) + data, "long header": struct.pack("<Q", 2**63) + data, "text": b"{" * 5000}
    name = choice.choice(sorted(odd))
    return odd[name], f"another file: {name}"


def change_json(choice: random.Random, content: Any, names: tuple[str, ...] = ()) -> str:
    """One entry, however deep, is dropped, becomes something else, or moves to another name; in place."""
    path, spot = [], content
    while True:
        keys: list[Any] = sorted(spot) if isinstance(spot, dict) else list(range(len(spot)))
        if not keys:
            spot.update(new="x") if isinstance(spot, dict) else spot.append("x")
            return f"{path}: an entry more"
        key = choice.choice(keys)
        path.append(key)
        if not isinstance(spot[key], dict | list) or choice.random() < 0.25:
            break
        spot = spot[key]
    old, action = spot[key], choice.randrange(5)
    if action == 0:
        del spot[key]
    elif action == 1 and isinstance(spot, dict):
        spot[mutate.text(choice, names)] = spot.pop(key)
    elif action == 2:
        spot[key] = spot[choice.choice(keys)]
    else:
        spot[key] = choice.choice([*ODD, mutate.text(choice, names), mutate.text(choice, names)])
    return f"{path}: {str(old)[:30]!r} -> {str(spot[key])[:30]!r}" if action > 1 else f"{path}: dropped or renamed"


def _tensors_header(choice: random.Random, data: bytes) -> tuple[bytes, str]:
    """The JSON at the beginning of a safetensors file, and the length before it."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    about = header.get("__metadata__", {})
    if about and choice.random() < 0.5:
        key = choice.choice(sorted(about))
        about[key] = choice.choice([str(choice.choice(ODD)), json.dumps(choice.choice(ODD)), choice.choice(ODD)])
        note = f"{key}={about[key]!r:.60}"
    else:
        note = change_json(choice, header, tuple(header))
    text = choice.choice([json.dumps(header).encode()] * 9 + [b"[" * 100_000, b"null"])
    size = len(text) if choice.random() < 0.9 else choice.choice([0, 1, 2**31, 2**63, len(text) + 8])
    return struct.pack("<Q", size) + text + data[8 + length :], note


_TRAINING: dict[str, bytes] = {}


def _training_file(choice: random.Random) -> onnx.ModelProto:
    """A training model with its roles and its forward model in the metadata."""
    optimizers = {"sgd": memonger.SGD(lr=0.1, momentum=0.9), "adam": memonger.Adam(), "none": None}
    name = choice.choice(sorted(optimizers))
    if name not in _TRAINING:
        made = memonger.differentiate(
            training_models.classifier(), loss="softmax_cross_entropy", optimizer=optimizers[name]
        )
        _TRAINING[name] = ir.to_proto(made.ir).SerializeToString()
    return onnx.ModelProto.FromString(_TRAINING[name])


def training(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Metadata of training models changed: planned, trained a step, evaluated and exported."""
    key = choice.choice([training_roles.KEY, training_roles.KEY, forward_model.KEY, forward_model.KEY, parameters.KEY])
    model = training_models.classifier() if key == parameters.KEY else _training_file(choice)
    note = _change_metadata(choice, model, key)
    tell(mutation=f"{key}: {note}", stage="plan")
    path = compared.place(folder, model.SerializeToString())
    if only_stock:
        return "alone"
    source: Any = path
    if key == parameters.KEY:
        source = memonger.differentiate(path, loss="softmax_cross_entropy", optimizer=memonger.SGD())
    plan = memonger.search_plan(source, device="none", threads=1)
    plan.save(folder / "planned.onnx")
    compared.check_secret(folder / "planned.onnx")
    tell(stage="run")
    trainer = memonger.TrainingSession(folder / "planned.onnx")
    feeds = training_models.batch()
    trainer.step(feeds)
    tell(stage="run evaluate")
    mine = trainer.evaluate({"x": feeds["x"]})
    for array in mine.values():
        compared.check_secret(array)
    trainer.export(folder / "exported.onnx")
    compared.check_secret(folder / "exported.onnx")
    tell(stage="stock")
    theirs = compared.stock(folder / "exported.onnx", {"x": feeds["x"]}, "ORT_ENABLE_ALL")
    if theirs is None or any(not isinstance(array, np.ndarray) for array in mine.values()):
        return "alone"
    for name, array in mine.items():
        if array.dtype.kind == "f" and not np.allclose(array, theirs[0][name], 1e-4, 1e-5, equal_nan=True):
            raise Wrong("evaluate gives other numbers than the exported model")
    return "right"


def _change_metadata(choice: random.Random, model: onnx.ModelProto, key: str) -> str:
    names = tuple(value.name for value in (*model.graph.input, *model.graph.output, *model.graph.initializer))
    entry = next((entry for entry in model.metadata_props if entry.key == key), None)
    entry = entry if entry is not None else model.metadata_props.add(key=key, value=json.dumps(list(names[:3])))
    if choice.random() < 0.1:
        entry.value = choice.choice(["", "null", "{}", "[]", "[" * 100_000, "AAAA", '{"format": 1}', "NaN", "\0"])
        return entry.value[:20]
    if key != forward_model.KEY:
        content = json.loads(entry.value)
        said = [change_json(choice, content, names) for _ in range(choice.choice([1, 1, 2]))]
        entry.value = json.dumps(content)
        return "; ".join(said)
    data = zlib.decompress(base64.b64decode(entry.value))
    forward = onnx.ModelProto.FromString(data)
    changed, note = mutate.change(choice, forward) if choice.random() < 0.8 else mutate.spoil_bytes(choice, data)
    packed = zlib.compress(changed)
    if choice.random() < 0.1:
        packed, more = mutate.spoil_bytes(choice, packed)
        note += f"; packed: {more}"
    entry.value = base64.b64encode(packed).decode()
    return note


def _odd_feed(choice: random.Random, feed: np.ndarray) -> tuple[Any, str]:
    """Something else in place of an array."""
    kinds = ("f2", "f4", "f8", "i1", "i4", "i8", "u8", "?", "c8", ">f4", ">i8", "U5", "O", "M8[s]")
    made: dict[str, Callable[[], Any]] = {
        "odd": lambda: choice.choice(
            [None, "x", b"x", 7, 10**400, object(), {}, [], [[1], [2, 3]], {"a": 1}, range(3)]
        ),
        "type": lambda: feed.astype(choice.choice(kinds)),
        "shape": lambda: feed[:1] if choice.random() < 0.5 else feed[None],
        "no size": lambda: feed[:0],
        "fortran": lambda: np.asfortranarray(feed),
        "backwards": lambda: feed[::-1],
        "every other": lambda: np.repeat(feed, 2, 0)[::2],
        "read only": lambda: np.frombuffer(feed.tobytes(), feed.dtype).reshape(feed.shape),
        "masked": lambda: np.ma.masked_array(feed, feed > 0),
        "record": lambda: feed.view([("a", feed.dtype)]),
        "unaligned": lambda: np.frombuffer(b"x" + feed.tobytes(), np.uint8)[1:].view(feed.dtype).reshape(feed.shape),
        "huge": lambda: np.broadcast_to(np.zeros((), feed.dtype), (2**40, *feed.shape[1:])),
        "values": lambda: np.full_like(feed, choice.choice([-1, 99, 2**30])),
        "list": lambda: feed.tolist(),
        "scalar": lambda: feed.dtype.type(0),
    }
    name = choice.choice(sorted(made))
    return made[name](), name


def _odd_feeds(choice: random.Random, feeds: Mapping[str, Any]) -> tuple[Any, str]:
    if choice.random() < 0.12:
        odd = choice.choice(
            [None, "x", 7, [], [1], list(feeds.values()), list(feeds.items()), iter(feeds), b"", object()]
        )
        return odd, f"feeds {odd!r:.40}"
    changed: dict[Any, Any] = dict(feeds)
    name = choice.choice(sorted(changed))
    match choice.randrange(8):
        case 0:
            del changed[name]
            return changed, f"{name} missing"
        case 1:
            changed[choice.choice([None, 7, "", "a\0b", "no", ("a",)])] = changed[name]
            return changed, "one too many"
        case _:
            changed[name], note = _odd_feed(choice, changed[name])
            return changed, f"{name}: {note}"


def runs(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Inputs, targets, rates of the wrong kind: refused and nothing changes, or right numbers; then a good one."""
    if choice.random() < 0.5:
        return _steps(choice, tell, only_stock)
    name = choice.choice(compared.PLANS)
    tell(stage="device plan", mutation=name)
    data, inputs = compared.planned(name)
    good = {key: feed.copy() for key, feed in inputs.items()}
    path = compared.place(folder, data)
    bad, note = _odd_feeds(choice, good) if choice.random() < 0.6 else (dict(good), "good inputs")
    level = "ORT_DISABLE_ALL"
    expected = compared.stock(path, good, level)
    if only_stock:
        return compared.compare({}, compared.stock(path, bad, level))
    session = memonger.Session(path)
    if choice.random() < 0.5:
        session.run(good)
    assert expected is not None
    targets, more = _targets(choice, expected[0], bad)
    tell(mutation=f"{name}: {note}; {more}", stage="run")
    kept = {key: _copy(feed) for key, feed in bad.items()} if isinstance(bad, dict) else bad
    try:
        try:
            mine = session.run(bad, targets, copy=choice.random() < 0.7)
            if choice.random() < 0.3:
                mine = {name: np.array(array) for name, array in mine.items()}
            result = compared.compare(mine, compared.stock(path, kept, level), "odd inputs or targets: ")
        except memonger.MemongerError:
            result = "refused"
    finally:
        again = session.run(inputs)
    untouched = [n for n in good if _plain(kept, bad, n) and not _is_target(bad[n], targets)]
    if result == "refused" and not all(np.array_equal(kept[n], bad[n]) for n in untouched):
        raise Wrong("a refused run changed its inputs")
    compared.compare(again, expected, "after a bad run: ")
    if result == "refused":
        raise memonger.SessionError(note)
    return result


def _copy(feed: Any) -> Any:
    return copy.deepcopy(feed) if getattr(feed, "nbytes", 0) < 1 << 20 else feed


def _is_target(feed: np.ndarray, targets: Any) -> bool:
    """Whether an output was to be written over an input: a run that fails midway may have begun to."""
    arrays = targets.values() if isinstance(targets, dict) else ()
    return any(isinstance(array, np.ndarray) and np.may_share_memory(array, feed) for array in arrays)


def _plain(kept: Any, bad: Any, name: str) -> bool:
    one = bad.get(name) if isinstance(bad, dict) else None
    return isinstance(one, np.ndarray) and one.dtype.kind in "fiu" and kept[name] is not one


def _targets(choice: random.Random, outputs: Mapping[str, Any], feeds: Any) -> tuple[Any, str]:
    """Where outputs are to be written: into each other, into inputs, into what can't be written."""
    kind = choice.choice(
        ["none", "none", "new", "one for all", "overlap", "input", "read only", "odd", "shape", "name"]
    )
    made = {name: np.zeros_like(array) for name, array in outputs.items() if isinstance(array, np.ndarray)}
    name = choice.choice(sorted(made))
    size = sum(array.nbytes for array in made.values())
    if kind == "none":
        return None, "no targets"
    if kind in ("one for all", "overlap"):
        memory, at = np.zeros(size + 64, np.uint8), 0
        for each, array in made.items():
            made[each] = memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            at += 0 if kind == "one for all" else max(array.nbytes // 2 // 64 * 64, 4)
    elif kind == "input" and isinstance(feeds, dict):
        arrays = [a for a in feeds.values() if isinstance(a, np.ndarray) and a.dtype == made[name].dtype]
        fitting = [a for a in arrays if a.size >= made[name].size and a.flags.c_contiguous]
        if fitting:
            made[name] = fitting[0].reshape(-1)[: made[name].size].reshape(made[name].shape)
    elif kind == "read only":
        made[name].flags.writeable = False
    elif kind == "odd":
        return choice.choice([7, "x", [], {name: None}, {name: "x"}, {None: made[name]}, {name: [0.0]}]), kind
    elif kind == "shape":
        made[name] = np.zeros((*made[name].shape, 2), made[name].dtype)
    elif kind == "name":
        made["no such"] = made.pop(name)
    return made, f"targets: {kind}"


def _steps(choice: random.Random, tell: Tell, only_stock: bool) -> str:
    """A step nobody should ask for, then good ones: as if it had never been, where it was refused."""
    micro = choice.random() < 0.4
    good = [training_models.batch(seed) for seed in range(4)]
    tell(stage="run")
    if only_stock:
        return "alone"
    trainer, other = _trainer(micro), _trainer(micro)
    for each in (trainer, other) if choice.random() < 0.6 else ():
        each.step(good[0])
    batch, note, rate = _odd_step(choice, good, micro)
    tell(mutation=f"{'micro-batches' if micro else 'step'}: {note}, learning rate {mutate.shown(rate)}")
    before = _snapshot(trainer)
    try:
        if rate is not None and choice.random() < 0.5:
            trainer.learning_rate = rate
            before["rate"] = trainer.learning_rate
            trainer.step(batch)
        else:
            trainer.step(batch, learning_rate=rate)
    except memonger.MemongerError:
        _check_unchanged(before, trainer, "a step")
        trainer.learning_rate = other.learning_rate
        after = [each.step(good[2:] if micro else good[2]) for each in (trainer, other)]
        if after[0] != after[1] or _snapshot(trainer) != _snapshot(other):
            raise Wrong("a refused step changes the next") from None
        raise
    if "labels: values" in note:
        raise Wrong("labels that are no class are trained")
    _check_rate(rate)
    arrays = [{n: np.array(a) for n, a in one.items()} for one in (batch if isinstance(batch, list) else [batch])]
    if rate is None and all(a.dtype.kind in "fi" for one in arrays for a in one.values()):
        other.step(arrays)
        if _snapshot(trainer) != _snapshot(other):
            raise Wrong("a step on unusual arrays gives other numbers")
    return "right"


def _odd_step(choice: random.Random, good: list[dict[str, Any]], micro: bool) -> tuple[Any, str, Any]:
    rates = (*ODD, 10**400, object(), np.float64(1e300), np.array([1.0, 2.0]), "0.1")
    if choice.random() < 0.25:
        return (good[:2] if micro else good[1]), "good", choice.choice(rates)
    batch, note = _odd_feeds(choice, good[1])
    if micro and choice.random() < 0.7:
        batches = [good[0], batch, good[3]][choice.randrange(2) :]
        return choice.sample(batches, len(batches)), f"several, {note}", None
    return batch, note, None


KINDS = {"states": states, "training": training, "runs": runs}
