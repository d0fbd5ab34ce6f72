"""Plans which way every microbatch goes through a slow, uneven network (SkipPipe, arXiv 2502.19913), and proves how
good that is: arrangement of nodes into stages and routes together, by annealing on the simulated step."""
