"""From PyTorch. The core imports none of it."""
