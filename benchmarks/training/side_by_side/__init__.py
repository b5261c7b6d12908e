"""Plans beside what a user would pick instead: what `training.peers` (CPU) and `gpu_day` (CUDA) share."""
