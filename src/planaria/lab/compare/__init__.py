"""Comparisons of strategies on the same failures, and advice from their results."""
