"""A dense and a sparse model on the same prompt and target: over the same hop, how many heads does each need?

The hop is the sparse model's own: the one into the answer's position without which its answer loses most (see `hops`).
Both models are measured on it; where the dense model's is another one, that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from gossamer.attribution.diff import GraphDiff, diff_graphs
from gossamer.attribution.explain import IN_GRAPHS, Explanation, Measure, explain
from gossamer.attribution.frozen import freeze
from gossamer.attribution.held import Held
from gossamer.attribution.hops import SHARE, Carriers, Hop
from gossamer.attribution.replacement import replace_mlps
from gossamer.attribution.result import Method
from gossamer.attribution.targets import Kind, next_token_target, read_prompt
from gossamer.attribution.why import ScoreSplit, is_bilinear, split_score
from gossamer.circuits.store import Stored
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, require_same_tokenizer
from gossamer.transcoders.door import BUNDLED, load
from gossamer.transcoders.module import TranscoderSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Role = Literal["dense", "sparse"]
ROLES: tuple[Role, ...] = ("dense", "sparse")


@dataclass(frozen=True)
class TranscoderPair:
    """The transcoders of both models; either may be missing."""

    dense: TranscoderSet | None = None
    sparse: TranscoderSet | None = None

    @classmethod
    def bundled(cls, dense: LoadedModel, sparse: LoadedModel) -> Self:
        """Those that ship with the package, for the models that do."""
        return cls(*(_bundled(model) for model in (dense, sparse)))


def _bundled(model: LoadedModel) -> TranscoderSet | None:
    return load(model.name, model=model).to(model.device, model.dtype) if model.name in BUNDLED else None


@dataclass(frozen=True, eq=False)
class AttributedPair(Stored):
    """Both explanations, the hop they are compared on, and the measure by which heads are ranked unless said.

    `why` splits the score by which the first of those heads attends over the hop; for models with transcoders.
    """

    FORMAT: ClassVar[str] = "gossamer attributed pair"

    dense: Explanation
    sparse: Explanation
    hop: Hop
    measure: str
    share: float = SHARE
    why: dict[str, ScoreSplit] = field(default_factory=dict)

    def of(self, role: Role) -> Explanation:
        """The dense or the sparse model's."""
        return self.dense if role == "dense" else self.sparse

    @property
    def measures(self) -> list[str]:
        """What both models were measured by."""
        return [name for name in self.dense.measures if name in self.sparse.measures]

    def carriers(self, role: Role, measure: str | None = None) -> Carriers:
        """The fewest heads of a model that carry the share of the hop."""
        return self.of(role).measure(measure or self.measure).carriers(self.hop, self.share)

    def difference(self) -> GraphDiff | None:
        """From the dense model's pruned graph to the sparse one's; None without transcoders for both."""
        dense, sparse = self.dense.features, self.sparse.features
        if dense is None or sparse is None:
            return None
        return diff_graphs(dense.graph, sparse.graph, level="place")

    def sketch(self) -> Figure:
        """The picture: each model's heads for the share of the hop, the prompt, the sparse model's features."""
        from gossamer.figures.attribution_sketch import Output, SketchPanel, attribution_sketch

        dense, sparse = (self.carriers(role) for role in ROLES)
        tokens, share, boxes = self.sparse.tokens, f"{100 * self.share:g} %", self.sparse.boxes()
        by = f"{share} of {self.hop} by {self.measure}"
        carried = f"{sparse.total:+.3g} of {tokens.value:+.3g} over {counted(sparse.available, 'head')}"
        return attribution_sketch(
            SketchPanel(_headed(self.dense, dense), self.dense.tokens.maps(), dense.places, by),
            SketchPanel(
                _headed(self.sparse, sparse),
                tokens.maps(),
                sparse.places,
                f"{by}: key position {self.hop.key} to query position {self.hop.query}",
            ),
            hop=(self.hop.key, self.hop.query),
            output=Output(
                tokens.target.text,
                f"layer {tokens.n_layers}",
                f"{share} by {counted(len(sparse), 'head')}",
                f"p = {tokens.probability:.3g}",
                carried.replace("-", "−"),
            ),
            features=boxes,
            title=f"{tokens.model}: the prompt" + (" and the features on it" if boxes else ""),
            note=self._told(),
        )

    def _told(self) -> str:
        """What is explained and, where there are graphs, how much of them is errors."""
        found = [(one.tokens.model, one.features.graph.scores) for one in (self.dense, self.sparse) if one.features]
        errors = ", ".join(f"{model} {100 * scores.error_share:.0f} %" for model, scores in found)
        told = f"Target: {self.sparse.tokens.target.describe()}."
        return f"{told} Error nodes' share of the logits' inputs: {errors}." if errors else told


def _headed(explanation: Explanation, found: Carriers) -> str:
    return f"{explanation.tokens.model}: {counted(len(found), 'head')}"


def counted(n: int, what: str) -> str:
    """`1 head`, `2 heads`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def attribute(
    dense: LoadedModel,
    sparse: LoadedModel,
    prompt: str | Sequence[int],
    target: str,
    *,
    instead: Sequence[str] = (),
    kind: Kind | None = None,
    hop: Hop | None = None,
    measure: Measure | None = None,
    share: float = SHARE,
    transcoders: TranscoderPair | None = None,
    method: Method = "gradient",
    held: Held | None = None,
    ablate: Held | None = None,
    text: Sequences | None = None,
) -> AttributedPair:
    """Attribute the token `target` behind a prompt in both models, on the sparse model's answer hop or another one.

    `measure` ranks the heads: by default through features where both models have transcoders, by gradient otherwise.
    `transcoders` None are the bundled ones of bundled models, where graphs explain the `kind` of target (centred logits
    and logit differences), and `TranscoderPair()` is none. For `method`, `held`, `ablate` and `text` see `explain`.
    """
    require_same_tokenizer(dense, sparse)
    if not len(prompt):
        raise GossamerError("The prompt is empty; give the text in front of the target.")
    if transcoders is None:
        in_graphs = kind is None or kind in IN_GRAPHS
        transcoders = TranscoderPair.bundled(dense, sparse) if in_graphs else TranscoderPair()
    if text is not None and transcoders.dense is None and transcoders.sparse is None:
        raise GossamerError("A text shows where features are active, and without transcoders there are none; omit it.")
    found = {}
    for role, model, features in (("sparse", sparse, transcoders.sparse), ("dense", dense, transcoders.dense)):
        read = read_prompt(model, prompt)
        asked = next_token_target(model, read, target, kind=kind, instead=instead)
        found[role] = explain(
            model, read, asked, transcoders=features, method=method, held=held, ablate=ablate, text=text
        )
        hop = hop or found[role].tokens.answer_hop
        _require_carried(found[role], hop)
    assert hop is not None
    both = all(explanation.features is not None for explanation in found.values())
    pair = AttributedPair(found["dense"], found["sparse"], hop, measure or ("graph" if both else "gradient"), share)
    asked_of = {"dense": (dense, transcoders.dense), "sparse": (sparse, transcoders.sparse)}
    splits = {str(role): _why(pair, role, *asked_of[role]) for role in ROLES}
    return replace(pair, why={role: split for role, split in splits.items() if split is not None})


def _why(pair: AttributedPair, role: Role, model: LoadedModel, features: TranscoderSet | None) -> ScoreSplit | None:
    """Why the hop's first head attends over it."""
    heads = pair.carriers(role).places  # refuses an unknown measure, or a share that is none
    if features is None or not heads or not is_bilinear(model):
        return None
    replacement = replace_mlps(freeze(model, pair.of(role).tokens.prompt.ids_T(model)), features)
    return split_score(replacement, *heads[0], pair.hop.query, pair.hop.key)


def _require_carried(explanation: Explanation, hop: Hop) -> None:
    tokens = explanation.tokens
    if not tokens.heads_LH(hop).any():
        others = [str(other) for other, _ in tokens.hops(hop.query) if not other.at_home]
        instead = f"; what reaches {hop.query} comes over {', '.join(others)}" if others else ""
        raise GossamerError(f"No head of {tokens.model} has an open edge that carries anything over {hop}{instead}.")
