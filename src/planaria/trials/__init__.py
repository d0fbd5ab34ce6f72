"""Trials: arms over seeds under equal conditions, in separate processes, with results that are kept."""
