"""Merge several networks into one."""
