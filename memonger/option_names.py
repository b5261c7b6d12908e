"""Names an option can take, as types. Importing them loads nothing else, so the command line can list them at once."""

from typing import Literal

Mode = Literal["training", "inference"]

Strategy = Literal["none", "cheap", "block", "sqrt", "log", "sweep", "marks", "budget", "exact"]
"""The names in `memonger.schedule.STRATEGIES`."""

Order = Literal["best", "file", "growth", "depth", "peak"]
"""``best``, and the names in `memonger.schedule.orders.ORDERS`."""

Level = Literal["disable", "basic", "extended", "all", "rewrite"]
"""The names in `memonger.lowering.device_form.LEVELS`."""

Precision = Literal["float16", "bfloat16"]
"""What products of a training step are rounded to; see `memonger.to_mixed_precision`."""

HeldWeights = Literal["auto", "packed", "mapped", "ahead"]
"""How many of the weights are in memory all the time; see `memonger.Options`."""

Engine = Literal["joblib", "ray"]
"""What makes several plans at a time: processes of this machine, or a cluster; see `memonger.plan_all`."""

LoopTarget = Literal["web", "triton", "openvino", "tensorrt", "mobile"]
"""The names in `memonger.loops.targets.RUNTIMES`."""
