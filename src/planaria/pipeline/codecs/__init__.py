"""Codecs of activations and their gradients between stages: what travels in place of a tensor, and how many bytes."""
