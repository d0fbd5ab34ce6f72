"""What is trained: a LLaMA that can be cut into pipeline stages, and its ways in from and out to other programs."""
