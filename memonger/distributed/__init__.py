"""A training step on several ranks: in come a plan with buckets and a group of processes, out go equal parameters."""
