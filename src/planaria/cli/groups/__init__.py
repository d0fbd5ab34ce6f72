"""Flags and help of the core's commands, a module per group. They import :mod:`planaria.cli.commands` when called."""
