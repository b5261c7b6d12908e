"""Plans for people and programs."""
