"""Experts of unequal size, or trained unequally long, for domains of unequal difficulty (HDEE, arXiv 2502.19385)."""
