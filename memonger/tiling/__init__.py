"""What runs slice after slice: which regions, in how many slices, written out as nodes, checked bit by bit."""
