"""Plans beside what a user would pick instead: what `benchmarks.peers` (CPU) and `benchmarks.gpu_day` (CUDA) share."""
