"""The evaluation of a dense/sparse pair, stage by stage, into one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import gossamer
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.evaluate.attention_use import attention_use
from gossamer.evaluate.baselines import baseline, rules_for
from gossamer.evaluate.losses import Forward, TextLosses, as_it_is, density_on, evaluating, losses_on, without_attention
from gossamer.evaluate.margins import margin_audit
from gossamer.evaluate.report import (
    BaselinePoint,
    Baselines,
    Density,
    MarginAudit,
    ModelScore,
    Provenance,
    Shift,
    SparsityReport,
)
from gossamer.evaluate.statistics import Bootstrap
from gossamer.evaluate.task_scores import task_scores
from gossamer.evaluate.texts import HeldOutText, ShiftedText, Text, held_out_text, shifted_texts, used
from gossamer.models import LoadedModel
from gossamer.models.loaded import require_same_tokenizer
from gossamer.sparsify import Constraint
from gossamer.sparsify import density as counted
from gossamer.tasks import NAMES

DENSE, SPARSE, CONTROL, WITHOUT = "dense", "sparse", "control", "without attention"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much of everything is measured; 0 leaves a stage out."""

    sequences: int = 256
    prompts: int = 2_000
    shift_sequences: int = 64
    baseline_sequences: int = 32
    audit_sequences: int = 8


FULL = Effort()
QUICK = Effort(sequences=32, prompts=200, shift_sequences=16, baseline_sequences=8, audit_sequences=2)


def evaluate(
    dense: LoadedModel,
    sparse: LoadedModel,
    *,
    text: Text = None,
    other_text: str | Path | None = None,
    control: LoadedModel | None = None,
    second_seeds: Sequence[LoadedModel] = (),
    tasks: Sequence[str] = NAMES,
    n_prompts: int | None = None,
    n_sequences: int | None = None,
    length: int | None = None,
    slack: float = 0.01,
    seed: int = 0,
    effort: Effort = FULL,
    tell: Tell | None = None,
) -> SparsityReport:
    """Judge a sparse model beside the dense model it was made from.

    `text`: held-out text, as a file, folder or `Sequences`; "self" for text sampled from the dense model; "language"
    for held-out documents of the synthetic language, which None means too, for models that speak it. `other_text` is
    text off the training distribution. `control` is the dense model trained on for as long as the sparse one;
    `second_seeds` are further sparse models. `slack`, in nats above the dense loss, is where the untrained baselines
    are read as well.
    `effort` is `FULL` or `QUICK`; `n_sequences` and `n_prompts` (a task) override it. `tell` hears what is being done.
    """
    Constraint(slack=slack)  # refuses what is no slack
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise GossamerError(f"A seed is a whole number of at least 0, not {seed!r}.")
    require_pair(dense, sparse, control, second_seeds)
    say = tell or (lambda message: None)
    effort = _chosen(effort, n_sequences, n_prompts)
    say("reading the text")
    held_out = held_out_text(dense, text, n=effort.sequences, length=length, seed=seed)
    job = Evaluation(dense, sparse, control, tuple(second_seeds), held_out, effort, seed, slack, say)
    with evaluating(*(model.hf for model in job.models.values())):
        return job.report(other_text, tasks)


def require_pair(
    dense: LoadedModel, sparse: LoadedModel, control: LoadedModel | None, second_seeds: Sequence[LoadedModel]
) -> None:
    """Refuse models that cannot be compared."""
    if dense.is_sparse:
        raise GossamerError(f"{dense.name} has gates, so it is not the dense model; give the dense model first.")
    if control is not None and control.is_sparse:
        raise GossamerError(
            f"{control.name} has gates, so it is no dense control; give the model trained with --control."
        )
    for model in (sparse, *second_seeds):
        if not model.is_sparse:
            raise GossamerError(
                f"{model.name} has no gates, so there is no sparsity to evaluate; give the sparse model second."
            )
    others = [sparse, *second_seeds, *([control] if control is not None else [])]
    for model in others:
        _require_same_anatomy(dense, model)
        require_same_tokenizer(dense, model)
        if model.hf.config.vocab_size != dense.hf.config.vocab_size:
            raise GossamerError(
                f"{dense.name} and {model.name} have different vocabularies ({dense.hf.config.vocab_size:,} and "
                f"{model.hf.config.vocab_size:,}); compare a sparse model with the dense model it was made from."
            )


def _require_same_anatomy(dense: LoadedModel, other: LoadedModel) -> None:
    for what in ("family", "n_layers", "n_heads", "d_model"):
        first, second = getattr(dense.anatomy, what), getattr(other.anatomy, what)
        if first != second:
            raise GossamerError(
                f"{dense.name} and {other.name} differ in {what} ({first} and {second}); compare a sparse model with "
                "the dense model it was made from."
            )


def _chosen(effort: Effort, n_sequences: int | None, n_prompts: int | None) -> Effort:
    for what, number in (("sequence", n_sequences), ("prompt a task", n_prompts)):
        if number is not None and number < 1:
            raise GossamerError(f"An evaluation needs at least one {what}, not {number}.")
    return Effort(
        effort.sequences if n_sequences is None else n_sequences,
        effort.prompts if n_prompts is None else n_prompts,
        effort.shift_sequences,
        effort.baseline_sequences,
        effort.audit_sequences,
    )


@dataclass
class Evaluation:
    """One evaluation: what it is about, and what it has left out so far."""

    dense: LoadedModel
    sparse: LoadedModel
    control: LoadedModel | None
    second_seeds: tuple[LoadedModel, ...]
    text: HeldOutText
    effort: Effort
    seed: int
    slack: float
    say: Tell
    skipped: list[str] = field(default_factory=list)

    @property
    def models(self) -> dict[str, LoadedModel]:
        """Every model under its role."""
        named = {DENSE: self.dense, SPARSE: self.sparse}
        if self.control is not None:
            named[CONTROL] = self.control
        return named | {f"seed {number}": model for number, model in enumerate(self.second_seeds, start=2)}

    def report(self, other_text: str | Path | None, tasks: Sequence[str]) -> SparsityReport:
        """All stages, in order; texts are read first, so that a missing one is not found out at the end."""
        shifted, unshifted = self.shifted(other_text)
        scores = self.scores()
        task_results, unsuitable = task_scores(self.models, tasks, n=self.effort.prompts, seed=self.seed, tell=self.say)
        self.skipped += unsuitable + unshifted
        self.say("attention, head by head")
        looked_at = {role: model.hf for role, model in self.models.items() if role == DENSE or model.is_sparse}
        heads = tuple(attention_use(hf, self.text.sequences, role=role) for role, hf in looked_at.items())
        return SparsityReport(
            provenance=self.provenance(tasks),
            scores=scores,
            tasks=tuple(task_results),
            heads=heads,
            shifts=tuple(self.shift(text) for text in shifted),
            baselines=self.baselines(),
            margins=self.margins(),
            skipped=tuple(self.skipped),
        )

    def provenance(self, tasks: Sequence[str]) -> Provenance:
        """What made the report."""
        settings: dict[str, Any] = {"effort": vars(self.effort), "tasks": list(tasks), "slack": self.slack}
        models = {role: model.provenance() for role, model in self.models.items()}
        return Provenance(gossamer.__version__, models, self.text.used(), self.seed, settings)

    def losses(self, text: Sequences, *, ablated: bool = False, only: Sequence[str] = ()) -> dict[str, TextLosses]:
        """Every model (or only some) on a text; with `ablated` also the dense model without its attention."""
        chosen = {role: model for role, model in self.models.items() if not only or role in only}
        forwards: dict[str, Forward] = {role: as_it_is(model.hf) for role, model in chosen.items()}
        if ablated:
            forwards[WITHOUT] = without_attention(self.dense.hf)
        vocabulary = int(self.dense.hf.config.vocab_size)
        return losses_on(text, forwards, reference=DENSE, device=self.dense.device, vocabulary=vocabulary)

    def scores(self) -> tuple[ModelScore, ...]:
        """Loss, divergence, gain kept and density of every model on the held-out text."""
        self.say("loss on held-out text")
        text = self.text.sequences
        losses = self.losses(text, ablated=True)
        bootstrap = Bootstrap(losses[DENSE].tokens_N, seed=self.seed)
        names = {role: model.name for role, model in self.models.items()} | {WITHOUT: self.dense.name}
        gated = {role: model for role, model in self.models.items() if model.is_sparse}
        return tuple(
            ModelScore(
                role=role,
                name=names[role],
                loss=bootstrap.mean(found.nats_N),
                perplexity=exp(found.loss),
                difference=bootstrap.mean(found.nats_N - losses[DENSE].nats_N),
                divergence=bootstrap.mean(found.divergence_N),
                gain_kept=bootstrap.ratio(
                    losses[WITHOUT].nats_N - found.nats_N, losses[WITHOUT].nats_N - losses[DENSE].nats_N
                ),
                density=_density(density_on(text, found.open_edges, gated[role].hf)) if role in gated else None,
            )
            for role, found in losses.items()
        )

    def shifted(self, other_text: str | Path | None) -> tuple[list[ShiftedText], list[str]]:
        """Texts off the training distribution, and why some are left out."""
        n = self.effort.shift_sequences
        if n == 0:
            return [], []
        return shifted_texts(self.dense, self.text, other_text, n=n, seed=self.seed)

    def shift(self, text: ShiftedText) -> Shift:
        """The pair (and the control) off the training distribution."""
        self.say(f"off the training distribution: {text.name}")
        losses = self.losses(text.sequences, only=(DENSE, SPARSE, CONTROL))
        dense, sparse = losses[DENSE], losses[SPARSE]
        return Shift(
            name=text.name,
            what=text.what,
            text=used(text.name, text.sequences),
            dense_loss=dense.loss,
            sparse_loss=sparse.loss,
            control_loss=losses[CONTROL].loss if CONTROL in losses else None,
            difference=Bootstrap(dense.tokens_N, seed=self.seed).mean(sparse.nats_N - dense.nats_N),
            divergence=sparse.divergence,
            density=_density(density_on(text.sequences, sparse.open_edges, self.sparse.hf)),
        )

    def baselines(self) -> Baselines | None:
        """What the dense model loses when its edges are cut without training."""
        n = min(self.effort.baseline_sequences, len(self.text.sequences))
        if n == 0:
            return None
        text = self.text.sequences.rows(slice(0, n))
        losses = self.losses(text, only=(DENSE, SPARSE))
        density = density_on(text, losses[SPARSE].open_edges, self.sparse.hf)
        above = losses[SPARSE].loss - losses[DENSE].loss
        sparse = BaselinePoint(0.0, density.of_causal_pairs, density.per_token, above)
        found = []
        for rule in rules_for(self.dense, text):
            self.say(f"without training: {rule.name}")
            found.append(baseline(rule, text, dense_loss=losses[DENSE].loss, sparse=sparse, slack=self.slack))
        return Baselines(n, self.slack, sparse, tuple(found))

    def margins(self) -> MarginAudit | None:
        """The gate-margin audit of the sparse model."""
        n = min(self.effort.audit_sequences, len(self.text.sequences))
        return margin_audit(self.sparse, self.text.sequences.rows(slice(0, n)), tell=self.say) if n else None


def _density(density: counted.Density) -> Density:
    return Density(
        density.of_causal_pairs,
        density.of_document_pairs,
        density.per_query_and_head,
        density.per_token,
        density.open_edges,
    )
