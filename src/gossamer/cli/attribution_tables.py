"""An attributed pair, or a task, as tables and as the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossamer.cli.attribution_data import meanings, no_graph
from gossamer.cli.console import percent
from gossamer.cli.pattern_sections import Pictures, shown
from gossamer.cli.report import Section, TableData

if TYPE_CHECKING:
    from gossamer.attribution.clusters import Clusters
    from gossamer.attribution.explain import Explanation
    from gossamer.attribution.hops import Carriers
    from gossamer.attribution.pair import AttributedPair, Role
    from gossamer.attribution.task_heads import PromptHeads, TaskHeads
    from gossamer.attribution.why import ScoreSplit

ROLES: tuple[Role, ...] = ("dense", "sparse")
MOST_HOPS, MOST_HEADS, MOST_CLUSTERS, MOST_PAIRS = 8, 12, 8, 8


def sections(pair: AttributedPair, pictures: Pictures | None = None) -> dict[str, Section]:
    """The page of one prompt."""
    pictures = pictures or {}
    heads = [heads_table(pair), _ranking(pair)]
    found = {
        "heads": Section("How many heads carry the hop", _told(pair), heads, shown(pictures, "sketch")),
        "hops": Section("What reaches the answer's position", _agreements(pair), [_hops_table(pair)]),
    }
    if any(pair.of(role).features for role in ROLES):
        found["graph"] = _graph_section(pair, pictures)
    if pair.why:
        found["why"] = _why_section(pair)
    return found


def _told(pair: AttributedPair) -> list[str]:
    reason = no_graph(pair)
    return [*hop_in_words(pair), *([reason] if reason else [])]


def hop_in_words(pair: AttributedPair) -> list[str]:
    """What is explained, over which hop, and what is counted."""
    tokens, hop = pair.sparse.tokens, pair.hop
    key, query = (tokens.prompt.tokens[place] for place in (hop.key, hop.query))
    return [
        f"Prompt: {tokens.prompt.text!r}. Target: {tokens.target.describe()}.",
        f"The hop is {hop}, from {key!r} to {query!r}" + _where_from(pair),
        f"Heads for {percent(pair.share, digits=0)}: the fewest heads whose |contributions| over the hop sum to"
        f" {pair.share:g} of all |contributions|. The signed share is their part of the signed total.",
    ]


def _where_from(pair: AttributedPair) -> str:
    own, theirs = pair.sparse.tokens.answer_hop, pair.dense.tokens.answer_hop
    text = ", the one into the answer's position without which the sparse model's target loses most."
    if own != pair.hop:
        text = f", as asked for; the sparse model's target loses most without {own}."
    return text if theirs == own else f"{text} The dense model's loses most without {theirs}."


def heads_table(pair: AttributedPair) -> TableData:
    """Heads for the share by every measure, beside what the hop comes to."""
    rows = []
    for name in pair.measures:
        dense, sparse = (pair.carriers(role, name) for role in ROLES)
        ratio = f"{len(dense) / len(sparse):.1f}×" if len(sparse) else "–"
        counts = [f"{len(found)} of {found.available}" for found in (dense, sparse)]
        totals = [f"{found.total:+.3g}" for found in (dense, sparse)]
        signed = [f"{found.signed_share:.2f}" for found in (dense, sparse)]
        rows.append([name, *counts, ratio, *totals, *signed])
    values = [f"{pair.of(role).tokens.value:+.3g}" for role in ROLES]
    rows.append(["the target itself", "", "", "", *values, "", ""])
    if any(pair.of(role).features for role in ROLES):
        rows.append(["error nodes' share", *(_error_share(pair.of(role)) for role in ROLES), *[""] * 5])
    header = ["measure", "dense", "sparse", "ratio", *(f"{role} total" for role in ROLES)]
    header += [f"{role} signed share" for role in ROLES]
    return TableData(f"Heads for {percent(pair.share, digits=0)} of {pair.hop}", header, rows)


def _error_share(found: Explanation) -> str:
    return "–" if found.features is None else percent(found.features.graph.scores.error_share)


def _ranking(pair: AttributedPair) -> TableData:
    """The heads themselves, by the best measure."""
    columns = [pair.carriers(role).heads[:MOST_HEADS] for role in ROLES]
    rows = []
    for place in range(max(map(len, columns))):
        cells = [f"{c[place].name} {c[place].contribution:+.3g}" if place < len(c) else "" for c in columns]
        rows.append([str(place + 1), *cells])
    return TableData(f"The heads, by {pair.measure}, largest first", ["", *ROLES], rows)


def _hops_table(pair: AttributedPair) -> TableData:
    """What comes over each hop, and what its loss costs where it was shut: at the answer's position."""
    tokens, query = pair.sparse.tokens, pair.hop.query
    found = {role: dict(pair.of(role).tokens.hops(query)) for role in ROLES}
    shut = query == len(tokens.prompt) - 1
    order = sorted(
        set(found["dense"]) | set(found["sparse"]),
        key=lambda hop: -(tokens.lost_K[hop.key] if shut else _total(found["sparse"].get(hop))),
    )
    rows = []
    for hop in order[:MOST_HOPS]:
        name = f"{hop}" + (" (at home)" if hop.at_home else "")
        lost = [f"{pair.of(role).tokens.lost_K[hop.key]:+.3g}" for role in ROLES] if shut else []
        cells = [f"{_total(found[role].get(hop)):+.3g}" for role in ROLES]
        counts = [str(len(found[role][hop])) if hop in found[role] else "0" for role in ROLES]
        rows.append([name, repr(tokens.prompt.tokens[hop.key]), *lost, *cells, *counts])
    header = ["hop", "from", *(f"{role} loses" for role in ROLES if shut)]
    header += [f"{role} {what}" for what in ("total", "heads") for role in ROLES]
    measured = "what the target loses without each; totals" if shut else "totals"
    title = f"Hops into position {query}: {measured} and heads by gradient"
    return TableData(title, header, rows, words=2)


def _total(carried: Carriers | None) -> float:
    return 0.0 if carried is None else carried.total


def _agreements(pair: AttributedPair) -> list[str]:
    lines = []
    for role in ROLES:
        tokens = pair.of(role).tokens
        if tokens.ablation is not None:
            found = tokens.agreement()
            lines.append(
                f"{tokens.model}: contributions against exact ablation of each of {found.edges:,} edges in the model"
                f" itself: Pearson {found.pearson:.2f}, Spearman {found.spearman:.2f}, the same sign for"
                f" {percent(found.same_sign, digits=0)} of the effect."
            )
    return lines


def _graph_section(pair: AttributedPair, pictures: Pictures) -> Section:
    rows, header = [], ["", "nodes", "edges", "replacement", "completeness", "errors' share"]
    clusters = []
    for role in ROLES:
        features = pair.of(role).features
        if features is not None:
            graph, scores = features.graph, features.graph.scores
            counts = [f"{len(graph.nodes):,}", f"{graph.n_edges:,}"]
            shares = (scores.replacement, scores.completeness, scores.error_share)
            rows.append([pair.of(role).tokens.model, *counts, *(f"{share:.2f}" for share in shares)])
            clusters.append(_clusters_table(pair.of(role).tokens.model, features.clusters))
    told = [
        "The graphs are pruned; their scores are those before pruning. Errors are what the features leave unexplained."
    ]
    difference = pair.difference()
    if difference is not None:
        told.append(f"{difference.describe()} A place is all features of one layer and token.")
    return Section(
        "Graphs of features",
        told,
        [TableData("Attribution graphs", header, rows), *clusters],
        shown(pictures, "graph-diff"),
    )


def _clusters_table(model: str, clusters: Clusters) -> TableData:
    """The most influential clusters; contexts where they were asked for."""
    header = ["token", "layers", "features", "share", "promotes"]
    found = clusters.by_share()[:MOST_CLUSTERS]
    with_contexts = any(one.contexts for one in found)
    rows = []
    for one in found:
        row = [f"{one.position} {one.token!r}", one.layers, str(len(one.features)), percent(one.share)]
        row.append(", ".join(map(repr, one.promoted[:3])))
        rows.append([*row, *([" | ".join(context.text for context in one.contexts[:2])] if with_contexts else [])])
    header += ["most active at the end of"] if with_contexts else []
    return TableData(f"{model}: clusters of features, by influence", header, rows, words=2)


def _why_section(pair: AttributedPair) -> Section:
    told = [
        "The first of each model's heads, and the parts of the score by which it attends over the hop: what its query"
        " reads times what its key reads, exact, patterns and norms in front held. Bias is all that no source gives."
    ]
    told += [_score_in_words(pair.of(role).tokens.model, pair.why[role]) for role in ROLES if role in pair.why]
    tables = [_pairs_table(pair.of(role).tokens.model, pair.why[role]) for role in ROLES if role in pair.why]
    return Section("Why it attends", told, tables)


def _score_in_words(model: str, split: ScoreSplit) -> str:
    where = f"{model}, L{split.layer}H{split.head} from {split.query} to {split.key}: "
    if split.offset is None:
        return where + f"score {split.score:+.3g}; a dense head has no gate."
    return (
        where + f"score {split.score:+.3g} and offset {split.offset:+.3g} make a gate logit of {split.gate_logit:+.3g}."
    )


def _pairs_table(model: str, split: ScoreSplit) -> TableData:
    rows = [[one.query, one.key, f"{one.part:+.3g}"] for one in split.largest(MOST_PAIRS)]
    title = f"{model}, L{split.layer}H{split.head}: largest parts of the score"
    return TableData(title, ["query reads", "key reads", "part"], rows, words=2)


def task_table(found: TaskHeads) -> TableData:
    """Every prompt's hop and heads, and the medians."""
    rows: list[Sequence[object]] = [
        [
            row.prompt,
            row.answer,
            f"{row.hop} {row.key_token!r}",
            *(f"{row.dense[name]} / {row.sparse[name]}" for name in found.measures),
            *_errors_of(row),
        ]
        for row in found.rows
    ]
    medians = [found.medians(name) for name in found.measures]
    rows.append(["median", "", "", *(f"{dense:g} / {sparse:g} ({ratio:.1f}×)" for dense, sparse, ratio in medians)])
    header = ["prompt", "answer", "hop, from", *(f"{name}: dense / sparse" for name in found.measures)]
    if errors := _errors_of(found.rows[0]):
        rows[-1] = [*rows[-1], *[""] * len(errors)]
        header.append("error nodes' share")
    title = f"Heads for {percent(found.share, digits=0)} of the answer's hop: {found.task}"
    return TableData(title, header, rows, words=3)


def _errors_of(row: PromptHeads) -> list[str]:
    """The error nodes' share in both models' graphs, as one cell, or none."""
    return [" / ".join(percent(share, digits=0) for share in row.error_shares.values())] if row.error_shares else []


def task_section(found: TaskHeads) -> Section:
    """The page of a task."""
    told = [f"{meaning}." for meaning in meanings(found.example).values()]
    told += [f"Left out: {why}" for why in found.skipped]
    return Section("Heads over a task", told, [task_table(found)])
