"""The loop that leads a run: it connects the pure control plane (``control/``) to workers, clock and files."""
