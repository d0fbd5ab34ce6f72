"""Trials: arms over seeds, under the same conditions, each in processes of its own, kept and not run twice."""
