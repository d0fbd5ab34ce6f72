"""A run as a page in a browser, while it goes on or afterwards: a story folded from its log, and a server of it."""
