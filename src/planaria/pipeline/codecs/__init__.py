"""Codecs of activations and their gradients between stages: what travels instead of a tensor, and how many bytes."""
