"""Train networks, cache them, run experiments with them, and draw the results."""
