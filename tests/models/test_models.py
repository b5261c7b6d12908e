"""The reference networks: published sizes, valid files, marks, and runs on stock onnxruntime."""

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto

import models
from models.__main__ import main
from tests.support import networks

ROOT = Path(__file__).parents[2]

PUBLISHED = {
    # torchvision.models, weights tables
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet201": 20_013_928,
    "mobilenet_v2": 3_504_872,
    "vit_b16": 86_567_656,
    # Caffe's bvlc_googlenet without auxiliary heads
    "googlenet": 6_998_552,
    # timm's resnet200
    "resnet200": 64_673_832,
    # He et al. 2016: 1.7M (option A) and 10.2M; Huang et al. 2017: 0.8M
    "resnet110": 1_727_962,
    "resnet1001": 10_327_706,
    "densenet_bc100": 769_162,
    # Hugging Face's gpt2
    "gpt2": 124_439_808,
    # Hugging Face's BertForSequenceClassification of bert-large-uncased
    "bert_large": 335_143_938,
    # the paper's table of layers, one channel in and two classes
    "unet": 31_030_658,
}

SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"image": 64, "width": 0.1},
    "vgg11": {"image": 32, "width": 0.1},
    "vgg16": {"image": 32, "width": 0.1},
    "vgg19": {"image": 32, "width": 0.1},
    "googlenet": {"image": 64, "width": 0.25},
    "resnet18": {"image": 32, "width": 0.125},
    "resnet34": {"image": 32, "width": 0.125},
    "resnet50": {"image": 32, "width": 0.125},
    "resnet101": {"image": 32, "width": 0.125},
    "resnet152": {"image": 32, "width": 0.125},
    "resnet200": {"image": 32, "width": 0.125},
    "resnet110": {"image": 16, "width": 0.25},
    "resnet1001": {"image": 8, "width": 0.25, "depth": 56},
    "densenet121": {"image": 32, "growth": 4},
    "densenet201": {"image": 32, "growth": 4},
    "densenet_bc100": {"image": 16, "growth": 4},
    "mobilenet_v2": {"image": 32, "width": 0.25},
    "lstm": {"seq_len": 4, "num_hidden": 16, "vocabulary": 20},
    "unet": {"image": 32, "width": 0.125},
    "gpt": {"width": 32, "seq_len": 8, "vocabulary": 50, "num_layers": 2},
    "gpt2": {"width": 48, "seq_len": 8, "vocabulary": 50},
    "bert_large": {"width": 32, "num_layers": 2, "seq_len": 8, "longest": 12, "vocabulary": 50},
    "vit": {"width": 32, "num_layers": 2},
    "vit_b16": {"image": 32, "width": 48},
}

DEEPER = {"vgg11", "vgg16", "resnet34", "resnet101", "resnet152", "densenet121"}
"""Built as others of their families are, with another number of layers, which the number of parameters tells."""
VARIED = tuple(name for name in models.NAMES if name not in DEEPER)


@functools.cache
def small(name: str, *, batch: int | None = 2, training: bool = False, seed: int = 0) -> onnx.ModelProto:
    """Return a network cut down to run in a moment; shared by all tests, so not to be changed."""
    return models.build(name, batch=batch, training=training, seed=seed, **SMALL[name])


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    return networks.stock(model, "ORT_DISABLE_ALL", threads=1)


def random_inputs(model: onnx.ModelProto, seed: int, batch: int = 2) -> dict[str, npt.NDArray[np.generic]]:
    generator = np.random.default_rng(seed)
    feeds: dict[str, npt.NDArray[np.generic]] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or batch for dim in tensor.shape.dim]
        if tensor.elem_type == TensorProto.FLOAT:
            feeds[value.name] = generator.standard_normal(shape, np.float32)
        else:
            feeds[value.name] = generator.integers(0, 2 if value.name == "labels" else 20, shape)
    return feeds


def marks(model: onnx.ModelProto) -> dict[str, str]:
    """Return the stage of each marked node, by its first output's name."""
    return {
        node.output[0]: prop.value
        for node in model.graph.node
        for prop in node.metadata_props
        if prop.key == "mirror_stage"
    }


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its weights as inputs: inference then copies no megabytes."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.initializer[:]
    for tensor in model.graph.initializer:
        bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return bare


def test_every_network_is_tested_small() -> None:
    assert tuple(SMALL) == models.NAMES
    assert set(PUBLISHED) == set(models.NAMES) - {"lstm", "gpt", "vit"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert models.parameter_count(models.build_ir(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", VARIED)
def test_both_forms_have_the_same_parameters(name: str) -> None:
    inference, training = small(name), small(name, training=True)
    assert list(inference.graph.initializer) == list(training.graph.initializer)


def test_lstm_parameter_count_follows_from_its_layers() -> None:
    model = models.build_ir("lstm", num_hidden=8, num_embed=5, num_layers=2, vocabulary=11)
    first, second, decoder = 32 * (5 + 8 + 2), 32 * (8 + 8 + 2), 11 * (8 + 1)
    assert models.parameter_count(model) == 11 * 5 + first + second + decoder


def test_parameter_count_reads_files_too() -> None:
    assert models.parameter_count(small("resnet18")) == models.parameter_count(
        models.build_ir("resnet18", **SMALL["resnet18"])
    )


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", VARIED)
def test_model_is_valid_and_static(name: str, training: bool) -> None:
    model = small(name, training=training)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    known = {v.name: v for v in [*inferred.graph.value_info, *inferred.graph.output]}
    for node in model.graph.node:
        for output in node.output:
            dims = known[output].type.tensor_type.shape.dim
            assert all(dim.dim_value > 0 for dim in dims), f"{output} has dimensions {dims}"


@pytest.mark.parametrize("name", VARIED)
def test_every_node_and_value_has_its_own_name(name: str) -> None:
    graph = small(name, training=True).graph
    values = [v.name for v in graph.input] + [t.name for t in graph.initializer]
    values += [output for node in graph.node for output in node.output]
    nodes = [node.name for node in graph.node]
    assert len(set(values)) == len(values)
    assert len(set(nodes)) == len(nodes)
    assert all([*values, *nodes])


@pytest.mark.parametrize("name", VARIED)
def test_marks_are_on_values_that_are_read_later(name: str) -> None:
    model = small(name, training=True)
    read = {value for node in model.graph.node for value in node.input} | {v.name for v in model.graph.output}
    assert len(marks(model)) >= 3
    assert set(marks(model)) <= read


def test_residual_networks_are_marked_once_a_unit() -> None:
    stages = marks(small("resnet200", training=True))
    assert set(stages) == {"stem/pool"} | {
        f"stage{s}/unit{u}/relu" for s, count in enumerate((3, 24, 36, 3), 1) for u in range(1, count + 1)
    }
    assert set(stages.values()) == {"True"}


def test_lstm_marks_are_stages_of_one_step() -> None:
    stages = marks(models.build("lstm", training=True, seq_len=3, num_layers=2, num_hidden=4, vocabulary=5))
    assert [list(stages.values()).count(str(step)) for step in range(3)] == [4, 4, 4]
    assert stages["t0/layer1/c"] == "0"
    assert stages["layer1/last_h"] == "2"


def test_only_training_form_is_marked() -> None:
    assert not marks(small("resnet200"))


@pytest.mark.parametrize("name", VARIED)
def test_inference_form_tells_inputs_apart(name: str) -> None:
    model = small(name)
    runner = session(model)
    a, b = (runner.run(["logits"], random_inputs(model, seed))[0] for seed in (1, 2))
    assert np.isfinite(a).all()
    assert np.abs(a).max() < 100
    assert np.abs(a - b).max() > 0.05 * np.abs(a).max()
    assert np.ptp(a) > 0.1


@pytest.mark.parametrize("name", VARIED)
def test_training_form_gives_a_finite_loss(name: str) -> None:
    model = small(name, training=True)
    names = [value.name for value in model.graph.output]
    results = dict(zip(names, session(model).run(None, random_inputs(model, 1)), strict=True))
    assert names[0] == "loss"
    assert results["loss"].shape == ()
    assert 0 < results["loss"] < 50
    assert all(np.isfinite(result).all() for result in results.values())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "lstm", "unet", "gpt", "vit"])
def test_symbolic_batch_runs_at_any_size(name: str) -> None:
    model = small(name, batch=None)
    onnx.checker.check_model(model, full_check=True)
    feeds = random_inputs(model, 1, batch=3)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    np.testing.assert_array_equal(
        session(model).run(["logits"], feeds)[0], session(small(name, batch=3)).run(["logits"], feeds)[0]
    )


def test_training_form_returns_next_statistics() -> None:
    model = models.build("resnet18", batch=2, training=True, **SMALL["resnet18"])
    feeds = random_inputs(model, 1)
    probe = onnx.helper.make_empty_tensor_value_info("stem/conv")
    mean_name = "stem/bn.next_mean"
    assert mean_name in [value.name for value in model.graph.output]
    model.graph.output.append(probe)
    conv, mean = session(model).run(["stem/conv", mean_name], feeds)
    np.testing.assert_allclose(mean, 0.1 * conv.mean(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_lstm_decodes_all_steps_at_once_or_each_alone() -> None:
    both = [models.build("lstm", batch=2, concat_decode=concat, **SMALL["lstm"]) for concat in (False, True)]
    feeds = random_inputs(both[0], 1)
    steps, concat = (session(model).run(["logits"], feeds)[0] for model in both)
    np.testing.assert_allclose(steps, concat, rtol=1e-5, atol=1e-6)
    both = [models.build("lstm", training=True, concat_decode=concat, **SMALL["lstm"]) for concat in (False, True)]
    feeds = random_inputs(both[0], 1)
    steps, concat = (session(model).run(["loss"], feeds)[0] for model in both)
    np.testing.assert_allclose(steps, concat, rtol=1e-5)


def test_gpt_sees_no_later_token() -> None:
    model = small("gpt")
    feeds = random_inputs(model, 1)
    changed = {"tokens": feeds["tokens"] + (np.arange(8) == 5)}
    runner = session(model)
    before, after = (runner.run(["logits"], f)[0] for f in (feeds, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize("name", ["resnet18", "lstm", "gpt"])
def test_same_seed_gives_same_bytes(name: str) -> None:
    first, again, other = (
        models.build(name, training=True, seed=seed, **SMALL[name]).SerializeToString() for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_dropout_is_in_the_training_form_only_and_seeded() -> None:
    def dropouts(training: bool) -> list[onnx.NodeProto]:
        return [node for node in small("alexnet", training=training).graph.node if node.op_type == "Dropout"]

    assert not dropouts(training=False)
    seeds = [attribute.i for node in dropouts(training=True) for attribute in node.attribute]
    assert len(set(seeds)) == 2


def test_the_1001_layer_network_builds_in_five_seconds() -> None:
    start = time.process_time()  # not of the clock on the wall, which other processes slow down
    model = models.build("resnet1001", training=True)
    assert time.process_time() - start < 5
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 1000 + 3  # and the shortcuts'


def test_full_size_shapes_agree_with_onnx() -> None:
    model = without_weights(models.build("googlenet", batch=4))
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    assert shapes["stem/pool2"] == [4, 192, 28, 28]
    assert shapes["inception5b/concat"] == [4, 1024, 7, 7]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet19", {}, "resnet18"),
        ("resnet18", {"growth": 3}, "growth; it has units"),
        ("resnet18", {"batch": 0}, "a batch of 0"),
        ("resnet18", {"seed": -1}, "a seed of -1"),
        ("vgg16", {"image": 16}, "image is too small"),
        ("unet", {"image": 100}, "not a multiple of 16"),
        ("resnet110", {"depth": 100}, "depth 100 is not 6n"),
        ("gpt", {"heads": 3}, "3 heads don't divide"),
        ("vit", {"patch": 5}, "patches of 5 don't divide"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build_ir(name, **settings)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "models", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_command_writes_a_model(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    done = command("resnet18", "--batch", "any", "--image", "32", "--option", "width=0.125", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"{path}: 241,712 parameters, 69 nodes")
    assert done.stderr.count("\n") == 1
    onnx.checker.check_model(onnx.load(path), full_check=True)


def test_command_lists_and_refuses() -> None:
    listed = CliRunner().invoke(main, ["--list"])
    assert [line.split(":")[0] for line in listed.stdout.splitlines()] == list(models.NAMES)
    refused = CliRunner().invoke(main, ["gpt", "--image", "32"])
    assert refused.exit_code == 2
    assert "gpt has no option image" in refused.stderr
