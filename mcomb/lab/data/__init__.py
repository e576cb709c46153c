"""Datasets, augmentation and splits."""
