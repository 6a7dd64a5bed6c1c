"""Running a comparison: circuits and attribution on the task, maps of both models, and what is read off them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.attribution.pair import TranscoderPair
from gossamer.attribution.task_heads import TaskHeads, attribute_task
from gossamer.circuits.compare import Comparison as CircuitComparison
from gossamer.circuits.compare import compare as compare_circuits
from gossamer.circuits.compare import require_able
from gossamer.circuits.pair import require_pair
from gossamer.circuits.smallest import HeadCircuits, smallest_circuit
from gossamer.compare.comparison import Comparison, Side
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.maps.capture import Prompts, capture
from gossamer.models import LoadedModel
from gossamer.patterns.change import Limits, dense_to_sparse
from gossamer.patterns.relations import relate
from gossamer.patterns.taxonomy import Thresholds, classify
from gossamer.tasks import Task, get

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much work a comparison does."""

    prompts: int = 32  # of the task, for circuits
    maps: int = 16  # of the task, whose maps are kept; of a task given as pairs, no more than it has
    attributed: int = 8  # of the task, whose answers are attributed to heads
    edges: bool = True  # circuits of edges too, not of heads alone
    steps: int = 5  # of the integrated gradients
    mlps: bool = True  # a second curve, with MLPs as components
    random_draws: int = 20  # of heads; of edges a quarter as many
    resamples: int = 10_000


FULL = Effort()
QUICK = Effort(prompts=8, attributed=2, edges=False, mlps=False, random_draws=0)


def compare(
    dense: LoadedModel,
    sparse: LoadedModel,
    task: str | Task = "copy",
    *,
    prompts: Prompts | None = None,
    transcoders: TranscoderPair | None = None,
    effort: Effort = FULL,
    level: float = 0.9,
    position_removed: bool = False,
    thresholds: Thresholds | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    force: bool = False,
    tell: Tell | None = None,
) -> Comparison:
    """Two models on one task: circuits, maps, patterns, statistics, relations, and the heads that carry the answer.

    Maps are of the task's clean prompts, or of `prompts`: texts, token ids or `Sequences`. `transcoders` None are
    the bundled ones of bundled models; without any, attribution is of tokens alone. `position_removed` relates
    heads without what the distance of tokens explains; `thresholds` are those of labels, `limits` those of
    statements. A task that the dense model cannot do is refused, unless `force` is set.
    """
    require_pair(dense, sparse)
    say = tell or (lambda message: None)
    mapped = get(task, dense.tokenizer, effort.maps, seed=seed) if isinstance(task, str) else task
    if isinstance(task, str):
        task = get(task, dense.tokenizer, effort.prompts, seed=seed)
    heads, circuits = _circuits(dense, sparse, task, effort, level=level, seed=seed, force=force, say=say)
    attribution, why_not = _attributed(dense, sparse, task, effort, transcoders, say)
    say("attention maps")
    texts = clean_prompts(mapped, effort.maps) if prompts is None else prompts
    maps = [capture(model, texts) for model in (dense, sparse)]
    say("patterns, statistics and relations")
    return Comparison(
        task=task.name,
        description=task.description,
        prompts=f"prompts of {task.name}" if prompts is None else _named(prompts),
        level=level,
        dense=Side(maps[0], classify(maps[0], thresholds), heads[0]),
        sparse=Side(maps[1], classify(maps[1], thresholds), heads[1]),
        statistics=dense_to_sparse(*maps, seed=seed, resamples=effort.resamples, limits=limits),
        relations=relate(*maps, position_removed=position_removed),
        circuits=circuits,
        attribution=attribution,
        not_attributed=why_not,
        provenance={"dense": dense.provenance(), "sparse": sparse.provenance(), "seed": seed, "task seed": task.seed},
    )


def _attributed(
    dense: LoadedModel,
    sparse: LoadedModel,
    task: Task,
    effort: Effort,
    transcoders: TranscoderPair | None,
    say: Tell,
) -> tuple[TaskHeads | None, str]:
    """The heads that carry the answers, or why there are none to tell."""
    if not effort.attributed:
        return None, "It was not asked for."

    def tell(done: int, total: int) -> None:
        say(f"{task.name}: attributing prompt {min(done + 1, total)} of {total}")

    tell(0, min(effort.attributed, len(task)))
    try:
        return attribute_task(dense, sparse, task, n=effort.attributed, transcoders=transcoders, tell=tell), ""
    except GossamerError as impossible:
        return None, str(impossible)


def clean_prompts(task: Task, n: int) -> list[list[int]]:
    """The token ids of a task's first clean prompts, in the task's order."""
    ids: dict[int, list[int]] = {}
    for batch in task.tokens:
        ids |= dict(zip(batch.rows, batch.clean_BT.tolist(), strict=True))
    return [ids[row] for row in sorted(ids)[:n]]


def _circuits(
    dense: LoadedModel,
    sparse: LoadedModel,
    task: Task,
    effort: Effort,
    *,
    level: float,
    seed: int,
    force: bool,
    say: Tell,
) -> tuple[tuple[HeadCircuits, HeadCircuits], CircuitComparison | None]:
    if effort.edges:
        circuits = compare_circuits(
            dense,
            sparse,
            task,
            steps=effort.steps,
            level=level,
            mlps=effort.mlps,
            random_draws=effort.random_draws,
            seed=seed,
            force=force,
            tell=say,
        )
        both = circuits.on(task.name)
        return (both.dense.heads, both.sparse.heads), circuits
    if not force:
        require_able(dense, task)
    heads = []
    for model in (dense, sparse):
        say(f"{task.name}, {model.name}: heads")
        draws = effort.random_draws
        found = smallest_circuit(
            model, task, level=level, with_mlps=effort.mlps, prune=draws > 0, random_draws=draws, seed=seed
        )
        heads.append(found)
    return (heads[0], heads[1]), None


def _named(prompts: Prompts) -> str:
    if isinstance(prompts, Sequences):
        return f"{len(prompts)} sequence{'s' * (len(prompts) != 1)} of {prompts.length} tokens"
    return "one prompt" if isinstance(prompts, str) or len(prompts) == 1 else f"{len(prompts)} prompts"
