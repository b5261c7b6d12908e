"""Gradients: a registry of rules, one file a family of operators, and the driver that applies them."""

from memonger.gradients import activation as activation
from memonger.gradients import convolution as convolution
from memonger.gradients import crossentropy as crossentropy
from memonger.gradients import elementwise as elementwise
from memonger.gradients import indexing as indexing
from memonger.gradients import matrix as matrix
from memonger.gradients import movement as movement
from memonger.gradients import normalization as normalization
from memonger.gradients import pooling as pooling
from memonger.gradients import random as random
from memonger.gradients import recurrent as recurrent
from memonger.gradients import reduce as reduce
from memonger.gradients import resize as resize
from memonger.gradients import softmax as softmax
