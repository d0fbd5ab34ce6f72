from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import dataset_of

from planaria.config.schema import RunConfig
from planaria.data.stream import Stream
from planaria.runtime.engine.samples import batches


def test_microbatches_are_consecutive_samples_of_the_stream(config: Callable[..., RunConfig]) -> None:
    recipe = config()
    stream = Stream(dataset_of(recipe), "train", recipe.model.context, recipe.seed)
    batch = batches(stream, first_sample=40, size=3)
    for microbatch in (2, 0, 1):  # the order of asking does not matter
        tokens, targets = batch(microbatch)
        assert tokens.shape == targets.shape == (3, recipe.model.context)
        for row in range(3):
            sample = stream.sample(40 + 3 * microbatch + row)
            assert torch.equal(tokens[row], sample[:-1])
            assert torch.equal(targets[row], sample[1:])
