"""``python -m memonger``."""

from memonger.cli import main

main()
