"""Audit of a model before its release: leakage of protected answers, and the files next to its weights."""
