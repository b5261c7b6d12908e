"""Gradients: a registry of rules, one file a family of operators, and the driver that applies them."""

from memonger.gradients import elementwise as elementwise
from memonger.gradients import matrix as matrix
from memonger.gradients import softmax as softmax
