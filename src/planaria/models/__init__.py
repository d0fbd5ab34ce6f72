"""Models: a LLaMA and decoders of ``transformers`` in pipeline stages, optimizers, and files of other programs."""
