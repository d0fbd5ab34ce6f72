"""The live page: a run's log, folded into frames and served to browsers during the run or afterwards."""
