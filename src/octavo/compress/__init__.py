"""Makes models smaller: grids, encoders and methods, each with its measured loss."""
