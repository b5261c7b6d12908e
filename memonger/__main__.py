"""``python -m memonger``."""

from memonger.cli.commands import main

main()
