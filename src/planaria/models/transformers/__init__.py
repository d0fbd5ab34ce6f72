"""Any causal decoder of the library ``transformers`` as a family: its own forward pass, cut into stages."""
