"""How many training steps fit into so many minutes; decided once, before a run begins."""

from __future__ import annotations

import time

from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.transcoders.activations import OnTheFly, scales_of
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.learner import shape_for
from gossamer.transcoders.trainer import Trainer

SAFETY = 0.93  # a shared machine is rarely as fast as in its best moment
WARM_STEPS, LEAST_STEPS, LEAST_SECONDS = 2, 3, 2.0


def steps_within(minutes: float, model: LoadedModel, text: Sequences, config: TranscoderConfig) -> int:
    """Time real steps on a trainer that is thrown away, and say how many fit (evaluation comes on top)."""
    source = OnTheFly(model, text, batch=config.batch, seed=config.seed)
    shape = shape_for(config, model.anatomy.n_layers, model.anatomy.d_model)
    trainer = Trainer(source, config.replace(steps=10_000), shape, scales_of(source))
    for _ in range(WARM_STEPS):
        trainer.advance()
    trainer.record()  # waits for the device
    started, done = time.monotonic(), 0
    while done < LEAST_STEPS or time.monotonic() - started < LEAST_SECONDS:
        trainer.advance()
        trainer.record()
        done += 1
    seconds = (time.monotonic() - started) / done
    steps = int(60 * minutes * SAFETY / seconds)
    if steps < 1:
        raise GossamerError(f"A step takes {seconds:.1f} s here, so none fits into {minutes:g} minutes; give more.")
    return steps
