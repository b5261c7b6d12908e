"""``python -m benchmarks.convolutions``."""

from benchmarks.convolutions.study import main

if __name__ == "__main__":
    main()
