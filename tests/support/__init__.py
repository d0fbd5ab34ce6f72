"""Helpers of several test files: ``from support.waiting import until``."""
