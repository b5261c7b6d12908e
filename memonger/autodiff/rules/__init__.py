"""Gradients: a registry of rules, one file a family of operators, and the driver that applies them."""

from memonger.autodiff.rules import attention as attention
from memonger.autodiff.rules import control as control
from memonger.autodiff.rules import convolution as convolution
from memonger.autodiff.rules import elementwise as elementwise
from memonger.autodiff.rules import fused as fused
from memonger.autodiff.rules import indexing as indexing
from memonger.autodiff.rules import lstm as lstm
from memonger.autodiff.rules import matrix as matrix
from memonger.autodiff.rules import movement as movement
from memonger.autodiff.rules import normalization as normalization
from memonger.autodiff.rules import random as random
from memonger.autodiff.rules import recurrent as recurrent
from memonger.autodiff.rules import sampling as sampling
from memonger.autodiff.rules import signal as signal
from memonger.autodiff.rules import softmax as softmax
