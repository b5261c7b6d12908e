"""How each operator's output shapes follow from its inputs: one rule an operator, one file a family."""

from memonger.shapes.rules import attention as attention
from memonger.shapes.rules import images as images
from memonger.shapes.rules import learners as learners
from memonger.shapes.rules import movement as movement
from memonger.shapes.rules import pointwise as pointwise
from memonger.shapes.rules import products as products
