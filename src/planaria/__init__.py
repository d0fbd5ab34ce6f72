"""planaria trains language models on machines that fail, lag and lie."""

__version__ = "0.1.0"
