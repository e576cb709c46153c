"""Load datasets, augment and split them."""
