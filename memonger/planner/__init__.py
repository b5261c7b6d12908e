"""From a model and options to a plan: the pipeline through all stages."""
