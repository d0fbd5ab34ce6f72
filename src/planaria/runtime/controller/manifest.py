"""Manifest of a sealed checkpoint, from the state of the run. Pure."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts.run_started import RunStarted
from planaria.control.state.run import RunState
from planaria.runtime.checkpoint.store import CheckpointManifest, replica_file


def manifest_of(seal: d.Seal, settings: RunStarted, config: RunConfig) -> CheckpointManifest:
    """Return the manifest of the checkpoint that is sealed."""
    return CheckpointManifest(
        step=seal.step,
        stages=seal.stages,
        pipeline_stages=config.pipeline.stages,
        samples=settings.samples_before(seal.step),
        replicas=settings.saved_replicas,
        first_block=seal.first_block if settings.max_replicas > 1 else None,
        blocks_ahead=seal.blocks_ahead,
        positions=seal.positions,
        digests={
            replica_file(file, replica, settings.replicas): sha256
            for replica, files in seal.digests.items()
            for file, sha256 in files.items()
        },
        model=config.model,
        exchange=config.exchange,
        block=None if settings.lockstep_replicas else settings.block_samples,
    )


def saved_generations(run: RunState) -> dict[int, int]:
    """Return replica → generation of its last save."""
    generations = {number: replica.saved_generation for number, replica in run.replicas.items()}
    if run.started.lockstep_replicas:
        return dict.fromkeys(range(run.started.lockstep_replicas), generations[0])
    return generations
