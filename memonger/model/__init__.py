"""From a model on disk or in memory to one graph with static shapes, its roles and marks; and back to a file."""
