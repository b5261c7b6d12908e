"""From a lowered model to the planner's integers: nodes, values, sizes, costs, liveness; and the checker of plans."""
