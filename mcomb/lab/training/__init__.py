"""Train networks."""
