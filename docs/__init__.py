"""The documentation, and the programs that make its figures and pages."""
