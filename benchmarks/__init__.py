"""Evidence for published numbers: ``python -m benchmarks.NAME [CASE]`` measures claims and prints PASS or FAIL."""
