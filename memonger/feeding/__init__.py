"""feeding: identities of samples and a reader of theirs → batches, within a limit of memory.

`FeederConfig` says what fits in the limit. `Feeder` reads, keeps, orders and assembles within it.
"""

from memonger.feeding.config import FeederConfig, Room
from memonger.feeding.feeder import Batch, Feeder

__all__ = ["Batch", "Feeder", "FeederConfig", "Room"]
