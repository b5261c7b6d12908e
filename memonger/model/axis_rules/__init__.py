"""How each operator is cut along an axis: one rule an operator, one file a family."""

from memonger.model.axis_rules import images as images
from memonger.model.axis_rules import indexing as indexing
from memonger.model.axis_rules import movement as movement
from memonger.model.axis_rules import pointwise as pointwise
from memonger.model.axis_rules import products as products
from memonger.model.axis_rules import reductions as reductions
from memonger.model.axis_rules import sequences as sequences
