"""One command per claim: ``python -m benchmarks.NAME`` measures it beside what bounds it, and says PASS or FAIL."""
