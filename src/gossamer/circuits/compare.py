"""Dense against sparse: the same prompts, the same rules, both models; how many heads and edges does each need?

    pair = compare(dense, sparse, ["copy", "ioi"])
    pair.table()          # heads and edges for each level, with the ratio and its interval, per task and over all
    pair.heads("copy")    # the selected heads of both models
    pair.save("circuits.safetensors")

What is counted: `heads` (MLPs free), `heads and MLPs`, `edges` of the component graph, `edges at heads` (those of them
that touch a head, all others kept), and `attention edges a prompt` (single edges from a query to a key, see
`attention_edges`: each prompt keeps its own, all others are forced shut).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.circuits.attention_curves import edge_curve
from gossamer.circuits.attention_edges import attention_edges
from gossamer.circuits.comparison import Comparison, ModelCircuits, Row, TaskComparison
from gossamer.circuits.edges import edge_circuits, edge_scores, random_edge_circuits
from gossamer.circuits.effect import LEVELS
from gossamer.circuits.pair import require_pair
from gossamer.circuits.runs import Batch, PairedRuns
from gossamer.circuits.scenarios import Ablation, check_ablation
from gossamer.circuits.search import Progress
from gossamer.circuits.smallest import RANDOM_DRAWS, smallest_circuit
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.tasks import NAMES, Task, accuracy, get, require_known

Tell = Callable[[str], None]
CHEAPER = 4  # times: how much less a random circuit of heads costs than one of edges, and how many more are drawn

__all__ = ["Comparison", "ModelCircuits", "Row", "TaskComparison", "compare", "require_able"]


def least_accuracy(chance: float) -> float:
    """What counts as doing a task: at least halfway from chance to perfect."""
    return chance + 0.5 * (1 - chance)


def require_able(model: LoadedModel, task: Task) -> float:
    """The model's accuracy, or a refusal if it cannot do the task."""
    share, least = accuracy(model.hf, task), least_accuracy(task.chance)
    if share < least:
        raise GossamerError(
            f"{model.name} cannot do {task.name}: its accuracy is {share:.1%} on {len(task)} prompts (chance"
            f" {task.chance:.1%}, needed {least:.1%}), so there is nothing to explain; take another task or force it."
        )
    return share


@dataclass(frozen=True)
class _Search:
    """How circuits are looked for, and who is told."""

    steps: int
    level: float
    ablation: Ablation
    mlps: bool
    random_draws: int
    seed: int
    batch: Batch
    tell: Tell
    progress: Progress | None

    def able(self, dense: LoadedModel, task: Task, *, force: bool) -> float:
        """The dense model's accuracy, if that will do."""
        return accuracy(dense.hf, task) if force else require_able(dense, task)

    def both(self, dense: LoadedModel, sparse: LoadedModel, task: Task, share: float) -> TaskComparison:
        """The circuits of two models on one task."""
        found = self.circuits(dense, task, share), self.circuits(sparse, task, accuracy(sparse.hf, task))
        return TaskComparison(task.name, task.description, task.metric, task.chance, len(task), *found)

    def circuits(self, model: LoadedModel, task: Task, share: float) -> ModelCircuits:
        """Everything that is counted, of one model on one task."""

        def doing(what: str) -> None:
            self.tell(f"{task.name}, {model.name}: {what}")

        how: dict[str, Any] = {"batch": self.batch, "progress": self.progress}
        doing("heads")
        drawn: dict[str, Any] = {"random_draws": self.random_draws, "seed": self.seed, "with_mlps": self.mlps}
        heads = smallest_circuit(model, task, level=self.level, ablation=self.ablation, **drawn, **how)
        doing("scores of edges")
        scores = edge_scores(model, task, steps=self.steps, **how)
        levels = sorted({*LEVELS, self.level})
        doing("circuits of edges")
        edges = edge_circuits(model, task, scores, levels=levels, **how)
        doing("circuits of edges at heads")
        at_heads = edge_circuits(model, task, scores, among="attention", levels=levels, **how)
        doing("single attention edges")
        runs = PairedRuns(model, task, whole=True, **how)
        scored = attention_edges(model, task, runs=runs)
        single = edge_curve(model, task, scored, levels=levels, runs=runs, progress=self.progress)
        size = edges.curve.smallest(self.level)
        draws = -(-self.random_draws // CHEAPER)
        chance: dict[str, Any] = {"draws": draws, "seed": self.seed, "batch": self.batch}
        random = random_edge_circuits(model, task, size, **chance) if size and draws else None
        return ModelCircuits(model.name, share, heads, scores, edges, at_heads, single, random)


def compare(
    dense: LoadedModel,
    sparse: LoadedModel,
    tasks: str | Task | Sequence[str | Task] = NAMES,
    *,
    n: int = 64,
    steps: int = 5,
    level: float = 0.9,
    ablation: Ablation = "corrupt",
    mlps: bool = True,
    random_draws: int = RANDOM_DRAWS,
    seed: int = 0,
    force: bool = False,
    batch: Batch = "auto",
    tell: Tell | None = None,
    progress: Progress | None = None,
    so_far: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Circuits of heads and of edges of two models on the same `n` prompts of each task.

    A task that the dense model cannot do is an error; among several it is left out, with the reason in `skipped`. A
    name that no task has is an error at once.
    `ablation` says what stands in for heads (and MLPs) outside a circuit; edges always carry corrupt activations.
    `mlps` adds the curve with MLPs as components; `random_draws` are of heads, of edges a quarter as many.
    `tell` hears what is being done, `progress` how much of it (done, of how much), and `so_far` gets the comparison on
    the tasks that are done, after each.
    """
    require_pair(dense, sparse)
    check_ablation(ablation)
    tell = tell or (lambda message: None)
    search = _Search(steps, level, ablation, mlps, random_draws, seed, batch, tell, progress)
    wanted = [tasks] if isinstance(tasks, str | Task) else list(tasks)
    _require_names(wanted)
    provenance = {"dense": dense.provenance(), "sparse": sparse.provenance(), "seed": seed}
    found: list[TaskComparison] = []
    skipped: list[str] = []
    for item in wanted:
        try:
            task = get(item, dense.tokenizer, n, seed=seed) if isinstance(item, str) else item
            share = search.able(dense, task, force=force)
        except GossamerError as reason:
            if len(wanted) == 1:
                raise
            skipped.append(str(reason))
            continue
        found.append(search.both(dense, sparse, task, share))
        if so_far is not None:
            so_far(Comparison(tuple(found), tuple(skipped), provenance))
    if not found:
        raise GossamerError("No task is left to compare on: " + " ".join(skipped))
    return Comparison(tuple(found), tuple(skipped), provenance)


def _require_names(wanted: Sequence[str | Task]) -> None:
    """Names that tasks have, each once: results are kept under them."""
    seen: set[str] = set()
    for item in wanted:
        if isinstance(item, str):
            require_known(item)
        name = item if isinstance(item, str) else item.name
        if name in seen:
            raise GossamerError(f"Two of the tasks are named {name}; give each task once, under a name of its own.")
        seen.add(name)
