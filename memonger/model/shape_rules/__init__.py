"""How each operator's output shapes follow from its inputs: one rule an operator, one file a family."""

from memonger.model.shape_rules import attention as attention
from memonger.model.shape_rules import images as images
from memonger.model.shape_rules import indexing as indexing
from memonger.model.shape_rules import learners as learners
from memonger.model.shape_rules import movement as movement
from memonger.model.shape_rules import pointwise as pointwise
from memonger.model.shape_rules import products as products
from memonger.model.shape_rules import reductions as reductions
from memonger.model.shape_rules import sequences as sequences
from memonger.model.shape_rules import signals as signals
