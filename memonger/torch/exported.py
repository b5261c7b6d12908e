"""from_torch: a PyTorch module → a forward model that can still be trained.

PyTorch's exporter writes models to be served: it folds batch normalization into convolutions and leaves Dropout out.
Here the module is traced first (`torch.export`), Dropout and batch normalization are put into a form the translation
keeps, and only then it is translated (`torch.onnx.export`), with no weight folded. In the result both stand in
inference form: what they do in training is a rewrite of the ONNX model, not of the module.
"""

import json
import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from memonger.errors import LoadError, RuntimeUnavailableError
from memonger.ir.model import Model
from memonger.ir.rewrite import remove_unused
from memonger.ir.values import all_values, input_at
from memonger.model.load import load
from memonger.model.parameters import KEY

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

OPSET = 20  # the exporter's own; from 23 on it writes Attention, from 21 on GroupNormalization

NOISE = ("torch.onnx._internal.exporter._registration",)  # loggers that tell at each export that torchvision is missing


def from_torch(
    module: "torch.nn.Module",
    example: "Sequence[torch.Tensor] | torch.Tensor",
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = False,
) -> Model:
    """Export a PyTorch module as a forward model, ready to be planned, or differentiated.

    Weights, biases and running statistics are initializers under their PyTorch names (``layer1.0.bn1.weight``), and
    copies: later training of the module doesn't reach the model. The names of the trainable parameters
    (``requires_grad``), in the order of ``module.named_parameters()``, stand as a JSON list in
    ``metadata_props["memonger.parameters"]``; one that the forward pass doesn't read isn't in it. A tensor with several
    names has the first.

    BatchNormalization and Dropout stand in inference form whatever the module's mode: the model computes what the
    module computes in ``eval()``. The ``training`` flags of modules are as before afterwards, also when the export
    fails. Of the module's own code that branch is exported which its mode selects, so a module that drops by hand only
    ``if self.training`` keeps that only when it is in ``train()``. Dropout1d to 3d become a Dropout of a mask of ones.
    AlphaDropout and FeatureAlphaDropout have no inference form: they vanish in ``eval()``, are random in ``train()``.

    Args:
        module: The module; its forward takes tensors by position. It is called with fake tensors, never run.
        example: Tensors of the shapes and dtypes of its inputs; a single one may stand alone.
        input_names: Names of the model's inputs; None: the names of forward's arguments.
        output_names: Names of the model's outputs; None: the exporter's.
        dynamic_batch: Leave the first dimension of every input open, as ``batch``: who takes the result has to bind it
            (``memonger.load(model, batch=32)``). The example's batch must be 2 or more.

    Raises:
        LoadError: not a module, or no example tensors; names that don't fit; the module can't be exported.
        RuntimeUnavailableError: torch or onnxscript isn't installed.
    """
    _check_is_there()
    from memonger.torch.example import examples_of

    examples, name = examples_of(module, example), type(module).__name__
    for index, tensor in enumerate(examples):
        if dynamic_batch and tensor.dim() and tensor.shape[0] < 2:
            raise LoadError(
                f"{name}: example {index} has a first dimension of {tensor.shape[0]}: torch.export takes that for a "
                "constant. For dynamic_batch give an example with a batch of 2 or more."
            )
    _check_names(input_names, output_names, len(examples), name)
    _warn_of_statistics(module)
    model = _export(module, examples, input_names, output_names, dynamic_batch)
    _check_exported_names(model, input_names, output_names, name)
    _fold_constants(model)
    _keep_inference_form(model)
    _copy_weights(model)
    passes.IdentityEliminationPass()(model)
    remove_unused(Model(model, name))
    _write_parameters(model, module)
    model.graph.name = name
    return Model(model, name) if dynamic_batch else load(model)


def _warn_of_statistics(module: "torch.nn.Module") -> None:
    """Say which layers won't be trained as PyTorch does: what ONNX has no word for."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            if part.momentum is None:
                logger.warning(
                    "'%s' averages its statistics over all batches (momentum=None): the model leaves them as they are.",
                    name,
                )
            if module.training and not part.training:
                logger.warning(
                    "'%s' is in eval() in a module in train(): the model doesn't tell it from the other batch "
                    "normalization, and memonger.to_training_mode turns it too.", name,
                )  # fmt: skip


def _check_is_there() -> None:
    try:
        import onnxscript  # noqa: F401  (the exporter's, and not among torch's own requirements)
        import torch  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"from_torch needs PyTorch and onnxscript, and {error.name} isn't there: pip install 'memonger[torch]'"
        ) from error


def _check_names(inputs: Sequence[str] | None, outputs: Sequence[str] | None, count: int, name: str) -> None:
    for flag, names in (("input_names", inputs), ("output_names", outputs)):
        if isinstance(names, str):
            raise LoadError(f"{name}: {flag} has to be a sequence of names, not a str.")
    if inputs is not None and len(inputs) != count:
        raise LoadError(f"{name} has {count} example inputs, and input_names={inputs!r}: give {count} names.")


def _check_exported_names(
    model: ir.Model, inputs: Sequence[str] | None, outputs: Sequence[str] | None, name: str
) -> None:
    graph = model.graph
    count = len(graph.outputs)
    if outputs is not None and len(outputs) != count:
        raise LoadError(f"{name} has {count} outputs, and output_names={outputs!r}: give {count} names.")
    for values, names, flag in ((graph.inputs, inputs, "input_names"), (graph.outputs, outputs, "output_names")):
        if names is not None and [v.name for v in values] != list(names):
            raise LoadError(
                f"{name}: {flag}={list(names)!r} can't all be given: two outputs are one value, or an input."
            )
    everything = (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs if v.name))
    seen: set[str] = set()
    for value in everything:
        if str(value.name) in seen:
            raise LoadError(f"{name}: the name '{value.name}' is taken by another tensor of the model: choose another.")
        seen.add(str(value.name))


def _export(
    module: "torch.nn.Module",
    examples: "tuple[torch.Tensor, ...]",
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_batch: bool,
) -> ir.Model:
    """Trace and translate."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    open_dims = None
    if dynamic_batch:
        batch = torch.export.Dim("batch")
        open_dims = tuple({0: batch} if tensor.dim() else None for tensor in examples)
    try:
        # The translation writes attention out, and its result lies otherwise in memory than a fused kernel's, which a
        # trace would take views of: "Cannot view a tensor", where a bias is learned.
        with _quiet(), _tracing_flags(module), sdpa_kernel(SDPBackend.MATH):
            program = torch.export.export(module, examples, dynamic_shapes=open_dims, strict=False)
            _keep_what_training_needs(program)
            exported = torch.onnx.export(
                program, dynamo=True, optimize=False, opset_version=OPSET, verbose=False,
                input_names=input_names, output_names=output_names,
            )  # fmt: skip
    except LoadError:
        raise
    except Exception as error:  # whatever the module's own code may raise
        raise LoadError(f"{type(module).__name__} can't be exported by PyTorch: {_root_cause(error)}") from error
    if exported is None:
        raise LoadError(f"{type(module).__name__} can't be exported: this PyTorch's exporter returns no model.")
    if dynamic_batch:
        _name_batch(exported.model)
    return exported.model


def _name_batch(model: ir.Model) -> None:
    """Call the open dimension ``batch``: the exporter gives it a number of its own (``s77``)."""
    symbols = {dim for value in model.graph.inputs if value.shape for dim in value.shape if not isinstance(dim, int)}
    for value in all_values(model.graph):
        if value.shape is not None and not value.is_initializer():
            value.shape = ir.Shape([ir.SymbolicDim("batch") if dim in symbols else dim for dim in value.shape])


def _root_cause(error: BaseException) -> str:
    """Return the first lines of the error that began it, at most 600 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the deprecations inside PyTorch, and its notes on torchvision."""
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in NOISE]
    try:
        for logger, _ in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights", UserWarning)  # of nn.LSTM
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)


@contextmanager
def _tracing_flags(module: "torch.nn.Module") -> Iterator[None]:
    """Set ``training`` where it decides what is traced, and set it back.

    Attention and recurrent layers give their dropout only in training mode (and in eval mode attention may take a fused
    path without a backward pass); batch normalization counts its batches there.
    """
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    dropping = (
        nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.LSTM,
        nn.GRU,
    )  # fmt: skip
    flags = {part: part.training for part in module.modules()}
    try:
        for part in flags:
            if isinstance(part, dropping):
                part.training = True
            elif isinstance(part, _BatchNorm):
                part.training = False
        yield
    finally:
        for part, flag in flags.items():
            part.training = flag


def _keep_what_training_needs(program: "torch.export.ExportedProgram") -> None:
    """Rewrite the traced graph: Dropout in a form the translation keeps, batch normalization by running statistics.

    Each node stays, under its name, with another target: the program's signature refers to nodes by name.
    """
    import torch

    aten = torch.ops.aten
    graph = program.graph_module.graph
    dropping = (
        aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, aten.feature_dropout_.default,
    )  # fmt: skip
    for node in list(graph.nodes):
        if node.target in dropping and node.args[1] == 0:
            node.args = (*node.args[:2], False)
        elif node.target in dropping[:2]:
            with graph.inserting_before(node):
                _keep_dropout(graph, node, in_place=node.target is aten.dropout_.default)
        elif node.target in dropping[2:]:
            with graph.inserting_before(node):
                _keep_feature_dropout(graph, node, in_place=node.target is aten.feature_dropout_.default)
        elif node.target is aten.batch_norm.default and node.args[3] is not None and node.args[4] is not None:
            node.args = (*node.args[:5], False, *node.args[6:])
        elif node.target in (aten.rnn_tanh.input, aten.rnn_relu.input) and node.args[5] and node.args[6]:
            raise LoadError(
                f"'{node.name}' is an nn.RNN with dropout={node.args[5]}, which PyTorch loses in the export: give it "
                "none and put nn.Dropout between its layers, or export the module in eval()."
            )
    program.graph_module.recompile()


def _keep_dropout(graph: "torch.fx.Graph", node: "torch.fx.Node", *, in_place: bool) -> None:
    """``dropout(x, p, train)`` → ``native_dropout(x, p, True)[0]``, which becomes a Dropout in either mode."""
    import torch

    x, ratio = node.args[:2]
    pair = graph.call_function(torch.ops.aten.native_dropout.default, (x, ratio, True))
    if in_place:
        dropped = graph.call_function(operator.getitem, (pair, 0))
        node.target, node.args = torch.ops.aten.copy_.default, (x, dropped)
    else:
        node.target, node.args = operator.getitem, (pair, 0)


def _keep_feature_dropout(graph: "torch.fx.Graph", node: "torch.fx.Node", *, in_place: bool) -> None:
    """Whole channels: ``x * dropout(ones[N, C, 1, ...])``."""
    import torch

    aten = torch.ops.aten
    x, ratio = node.args[:2]
    if not isinstance(x, torch.fx.Node):
        return
    corner = x
    for dim in range(2, x.meta["val"].dim()):
        corner = graph.call_function(aten.slice.Tensor, (corner, dim, 0, 1))
    ones = graph.call_function(aten.ones_like.default, (corner,))
    pair = graph.call_function(aten.native_dropout.default, (ones, ratio, True))
    mask = graph.call_function(operator.getitem, (pair, 0))
    node.target, node.args = (aten.mul_.Tensor if in_place else aten.mul.Tensor), (x, mask)


def _fold_constants(model: ir.Model) -> None:
    """Compute what depends on no input and no tensor of the module: scales, shapes, masks of ones, parts of splits."""
    from onnxscript import optimizer

    given = list(model.graph.initializers.values())
    count = len(model.graph.inputs)
    dropouts = [node for node in model.graph if node.op_type == "Dropout"]
    for node in dropouts:
        node.domain = "memonger.kept"  # else those in inference form vanish, and those of constants are drawn once
    model.graph.inputs.extend(given)  # what is an input isn't folded
    optimizer.fold_constants(model, onnx_shape_inference=True)
    while len(model.graph.inputs) > count:
        model.graph.inputs.pop()  # deleting a slice would leave the values marked as inputs
    for node in dropouts:
        node.domain = ""
    for node in model.graph:
        if node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) == 3 and (bias := node.inputs[2]) is not None:
            tensor = ir.convenience.get_const_tensor(bias)
            if bias not in given and tensor is not None and not tensor.numpy().any():
                node.resize_inputs(2)  # the exporter's zeros, where the module has no bias


def _keep_inference_form(model: ir.Model) -> None:
    """Every Dropout without its ``training_mode``; those that drop nothing are taken out."""
    for node in list(model.graph):
        if node.op_type != "Dropout" or node.domain != "":
            continue
        node.resize_inputs(min(len(node.inputs), 2))
        source, ratio = node.inputs[0], input_at(node, 1)
        tensor = None if ratio is None else ir.convenience.get_const_tensor(ratio)
        if source is None or tensor is None or node.outputs[0].is_graph_output():
            continue
        if float(tensor.numpy()) == 0.0:  # attention without dropout has one too
            node.outputs[0].replace_all_uses_with(source)


def _copy_weights(model: ir.Model) -> None:
    """Weights of the model's own: the exporter's are the module's, which may be trained further."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None:
            value.const_value = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=value.name)


def _write_parameters(model: ir.Model, module: "torch.nn.Module") -> None:
    """List the trainable parameters. A tensor of several names becomes the initializer of the first."""
    initializers = model.graph.initializers
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    trained = []
    for first, *others in names.values():
        kept = next((name for name in (first, *others) if name in initializers), None)
        if kept is None:
            continue
        if kept != first:
            initializers[kept].name = first
        trained.append(first)
    model.metadata_props[KEY] = json.dumps(trained)
