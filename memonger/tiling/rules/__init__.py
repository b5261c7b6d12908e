"""How each operator is cut along an axis: one rule an operator, one file a family."""

from memonger.tiling.rules import images as images
from memonger.tiling.rules import movement as movement
from memonger.tiling.rules import pointwise as pointwise
from memonger.tiling.rules import products as products
from memonger.tiling.rules import sequences as sequences
