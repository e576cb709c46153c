"""Cache trained networks and matchings."""
