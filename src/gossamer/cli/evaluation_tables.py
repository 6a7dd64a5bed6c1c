"""A sparsity report as the sections of a page: what is compared, how it reads, and what to beware of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.console import percent
from gossamer.cli.report import Picture, Section, TableData

if TYPE_CHECKING:
    from gossamer.evaluate import SparsityReport
    from gossamer.evaluate.report import Baseline, BaselinePoint, Estimate, Flips, HeadTable, ModelScore

NOTHING = "–"
MARGIN = 0.01  # a gate logit this close to zero is called near


SHOWN_IN = {
    "loss-density": "models",
    "density-map": "models",
    "attention-rows": "attention",
    "task-accuracy": "tasks",
    "gate-margins": "margins",
}


def sections(report: SparsityReport, pictures: Mapping[str, Path] | None = None) -> dict[str, Section]:
    """The whole report, in reading order; `pictures` are those that `figures.evaluation` wrote."""
    found = {"models": _models(report), "attention": _attention(report)}
    if report.tasks:
        found["tasks"] = _tasks(report)
    if report.shifts:
        found["shifts"] = _shifts(report)
    if report.baselines is not None:
        found["baselines"] = _baselines(report)
    if report.margins is not None:
        found["margins"] = _margins(report)
    return _with_pictures(found, pictures) if pictures else found


def _with_pictures(found: dict[str, Section], pictures: Mapping[str, Path]) -> dict[str, Section]:
    from gossamer.figures.evaluation import CAPTIONS

    for picture, path in pictures.items():
        name = SHOWN_IN[picture]
        shown = [*found[name].pictures, Picture(path, CAPTIONS[picture])]
        found[name] = replace(found[name], pictures=shown)
    return found


def _models(report: SparsityReport) -> Section:
    text = report.provenance.text
    rows = [[label, *(show(score) for score in report.scores)] for label, show in _SCORES]
    if report.above_control is not None:
        rows.append(["over the control", *_only("sparse", f"{report.above_control:+.4f}", report.roles)])
    title = f"{text.name}: {text.sequences} sequences of {text.length} tokens"
    return Section(
        title="How sparse, at what cost",
        paragraphs=[
            "The gates are as they are used: nothing is drawn at random. Intervals are resampled over sequences. "
            "Density comes in four forms because any one of them alone can flatter: open edges among all causal pairs, "
            "among the pairs inside one document, a query and head, and a token over the whole model. Nats throughout.",
            *report.skipped,
        ],
        tables=[TableData(title, ["", *report.roles], rows)],
    )


def _density(show: Callable[..., str], name: str) -> Callable[[ModelScore], str]:
    return lambda score: NOTHING if score.density is None else show(getattr(score.density, name))


_SCORES: tuple[tuple[str, Callable[[ModelScore], str]], ...] = (
    ("cross-entropy", lambda score: f"{score.loss.value:.4f}"),
    ("perplexity", lambda score: f"{score.perplexity:.3f}"),
    ("over dense", lambda score: NOTHING if score.role == "dense" else f"{score.difference.value:+.4f}"),
    ("    95 % interval", lambda score: NOTHING if score.role == "dense" else _interval(score.difference)),
    ("KL from dense", lambda score: NOTHING if score.role == "dense" else f"{score.divergence.value:.4f}"),
    (
        "attention's gain kept",
        lambda score: percent(score.gain_kept.value) if score.gain_kept is not None else NOTHING,
    ),
    ("open ÷ causal pairs", _density(lambda share: percent(share, digits=3), "of_causal_pairs")),
    ("open ÷ document pairs", _density(lambda share: percent(share, digits=3), "of_document_pairs")),
    ("open a query and head", _density("{:.4f}".format, "per_query_and_head")),
    ("open a token", _density("{:.2f}".format, "per_token")),
)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:+.4f} … {estimate.high:+.4f}"


def _only(role: str, cell: str, roles: Sequence[str]) -> list[str]:
    return [cell if each == role else NOTHING for each in roles]


def _tasks(report: SparsityReport) -> Section:
    roles = list(dict.fromkeys(score.role for score in report.tasks))
    accuracies, losses = [], []
    for name in report.task_names:
        scores = [report.task(name, role) for role in roles]
        shares = [percent(score.accuracy.value) for score in scores]
        accuracies.append([name, scores[0].prompts, percent(scores[0].chance), *shares])
        losses.append([name, *(f"{score.answer_loss:.4f}" for score in scores)])
    return Section(
        title="Tasks",
        paragraphs=["Held-out prompts: other names, years and sequences than the training text has."],
        tables=[
            TableData("Accuracy", ["task", "prompts", "chance", *roles], accuracies),
            TableData("Loss on the answer, nats", ["task", *roles], losses),
        ],
    )


def _attention(report: SparsityReport) -> Section:
    names = [table.role for table in report.heads]
    rows = [[label, *(show(table) for table in report.heads)] for label, show in _ROW_USE]
    return Section(
        title="Where attention goes",
        paragraphs=[
            "Before the gate means the softmax, which still runs over all keys; after the gate means what is carried. "
            "Excess is over attention spread evenly over the same rows: 0 says no preference."
        ],
        tables=[TableData("Averages over queries and heads", ["", *names], rows)],
    )


def _signed(number: float | None) -> str:
    return NOTHING if number is None else f"{number:+.3f}"


_ROW_USE: tuple[tuple[str, Callable[[HeadTable], str]], ...] = (
    ("first-token mass before, excess", lambda table: _signed(table.rows.first_excess[0])),
    ("first-token mass after, excess", lambda table: _signed(table.rows.first_excess[1])),
    ("entropy before, excess", lambda table: _signed(table.rows.entropy_excess[0])),
    ("entropy after, excess", lambda table: _signed(table.rows.entropy_excess[1])),
    ("mass carried", lambda table: percent(table.rows.carried)),
    ("empty rows", lambda table: percent(table.rows.empty_rows)),
    ("heads that are never open", lambda table: f"{len(table.dead_heads)} of {sum(map(len, table.open_edges))}"),
)


def _shifts(report: SparsityReport) -> Section:
    rows = [
        [
            shift.name,
            f"{shift.dense_loss:.4f}",
            f"{shift.difference.value:+.4f}",
            NOTHING if shift.control_loss is None else f"{shift.control_loss - shift.dense_loss:+.4f}",
            f"{shift.divergence:.4f}",
            percent(shift.density.of_causal_pairs, digits=3),
            f"{shift.density.per_token:.2f}",
        ]
        for shift in report.shifts
    ]
    header = ["text", "dense, nats", "sparse", "control", "KL", "open ÷ causal", "open a token"]
    return Section(
        title="Off the training distribution",
        paragraphs=[f"{shift.name}: {shift.what}." for shift in report.shifts],
        tables=[TableData("Dense loss, and what the others lose beyond it", header, rows)],
    )


def _baselines(report: SparsityReport) -> Section:
    found = report.baselines
    assert found is not None
    rows: list[list[str]] = [["the sparse model", *_point(found.sparse)]]
    for baseline in found.each:
        rows += [[f"{baseline.name}, {where}", *_point(point)] for where, point in _points(baseline, found.slack)]
    return Section(
        title="What cutting alone achieves",
        paragraphs=[
            "The dense model with edges cut and no training, on the same sequences as the sparse model.",
            *(f"{baseline.name}: {baseline.what}." for baseline in found.each),
        ],
        tables=[TableData("Without training", ["", "open ÷ causal", "open a token", "over dense"], rows)],
    )


def _points(baseline: Baseline, slack: float) -> list[tuple[str, BaselinePoint | None]]:
    return [
        ("same loss", baseline.at_sparse_loss),
        (f"+{slack:g} nats", baseline.at_slack),
        ("same density", baseline.at_sparse_density),
    ]


def _point(point: BaselinePoint | None) -> list[str]:
    if point is None:
        return ["never reached", NOTHING, NOTHING]
    return [percent(point.of_causal_pairs, digits=2), f"{point.per_token:.1f}", f"{point.difference:+.4f}"]


def _margins(report: SparsityReport) -> Section:
    audit = report.margins
    assert audit is not None
    rows = [
        [flips.name, flips.flipped, f"{flips.opened} / {flips.shut}", percent(flips.of_open, digits=3), _largest(flips)]
        for flips in audit.flips
    ]
    header = ["computed", "flipped", "opened / shut", "of open edges", "largest |g| flipped"]
    return Section(
        title="How close the gates are to the edge",
        paragraphs=[
            f"{percent(audit.closer_than(MARGIN), digits=3)} of allowed pairs have a gate logit within {MARGIN:g} of "
            "zero, where another way of computing the same thing may flip them.",
            *(f"{flips.name}: {flips.what}." for flips in audit.flips),
        ],
        tables=[TableData("Edges that flip", header, rows)],
    )


def _largest(flips: Flips) -> str:
    return NOTHING if flips.largest_margin_flipped is None else f"{flips.largest_margin_flipped:.4g}"
