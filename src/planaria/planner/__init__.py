"""Routes of microbatches through a slow, uneven network (SkipPipe, arXiv 2502.19913), with a proved bound: nodes are
arranged into stages together with the routes, by annealing on the simulated step."""
