"""Measure networks and their combinations."""
