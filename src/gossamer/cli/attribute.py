"""`gossamer attribute`: which heads and features made both models say a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from gossamer.cli.attribution_data import meanings, pair_data
from gossamer.cli.attribution_tables import sections, task_section
from gossamer.cli.console import err, progress, say_json, show_section
from gossamer.cli.figure import ATTRIBUTION, SUFFIXES, draw_all
from gossamer.cli.loading import load_all
from gossamer.cli.prompts import LANGUAGE
from gossamer.cli.report import Report
from gossamer.cli.transcoding import find_transcoders
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.attribution.explain import Measure
    from gossamer.attribution.hops import Hop
    from gossamer.attribution.pair import AttributedPair, TranscoderPair
    from gossamer.attribution.result import Method
    from gossamer.attribution.targets import Kind
    from gossamer.attribution.task_heads import TaskHeads
    from gossamer.corpus import Sequences
    from gossamer.models import LoadedModel

CONTEXT_SEQUENCES = 64
DIFFERENCE = "graph-diff.safetensors"
EXAMPLE = (
    'gossamer attribute bundled/dense bundled/sparse --prompt \'The opposite of "large" is "\' --target small --out why'
)


def command(
    dense: Annotated[str, typer.Argument(help="The dense model.")],
    sparse: Annotated[str, typer.Argument(help="The sparse model that was made from it.")],
    prompt: Annotated[str | None, typer.Option(help="The text in front of the target.")] = None,
    target: Annotated[str | None, typer.Option(help="The next token to explain.")] = None,
    instead: Annotated[list[str] | None, typer.Option(help="Explain the difference to this token.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="centred logit, logit, logit difference, probability or log probability.")
    ] = None,
    hop: Annotated[str | None, typer.Option(help="KEY,QUERY: another hop than the answer's.")] = None,
    share: Annotated[float, typer.Option(help="The share of the hop that is to be covered.")] = 0.8,
    measure: Annotated[str | None, typer.Option(help="Rank the heads by gradient, direct or graph.")] = None,
    method: Annotated[str, typer.Option(help="Edges by gradient (in the run) or integrated (up to it).")] = "gradient",
    free_norms: Annotated[
        bool, typer.Option("--free-norms", help="Let gradients of edges go through the norms' scales too.")
    ] = False,
    transcoder: Annotated[
        list[str] | None, typer.Option(help="Transcoders of one of the models; may be repeated.")
    ] = None,
    no_transcoders: Annotated[
        bool, typer.Option("--no-transcoders", help="Attention edges and heads only, no graphs of features.")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="Show where in this text features are active: a file, a folder or 'language'.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Also ablate every single edge, exactly.")] = False,
    task: Annotated[str | None, typer.Option(help="Instead of a prompt: all prompts of a task.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of the task.")] = 24,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts of the task.")] = 0,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Write results, pictures and a page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which attention hop carries an answer, and how many heads of each model carry it."""
    _require_one_question(prompt, target, task)
    of_a_prompt = {
        "--instead": instead,
        "--kind": kind,
        "--hop": hop,
        "--measure": measure,
        "--method": method != "gradient",
        "--free-norms": free_norms,
        "--text": text,
        "--check": check,
    }
    _require_of_a_prompt(task, [name for name, given in of_a_prompt.items() if given])
    _require_readable(text)
    _require_transcoders_to_be_wanted(transcoder, text, left_out=no_transcoders)
    from gossamer.attribution.held import Held
    from gossamer.attribution.pair import attribute
    from gossamer.attribution.weights import REAL

    models = load_all([dense, sparse])
    transcoders = _transcoders(models, transcoder or [], left_out=no_transcoders, for_task=task is not None)
    if task is not None:
        _show_task(_over_task(models, task, (n, seed), share, transcoders), out_folder, json=json)
        return
    assert prompt is not None
    assert target is not None
    with err.status("attributing"):
        found = attribute(
            models[0],
            models[1],
            prompt,
            target,
            instead=instead or [],
            kind=cast("Kind | None", kind),
            hop=_hop(hop),
            measure=cast("Measure | None", measure),
            share=share,
            transcoders=transcoders,
            method=cast("Method", method),
            held=Held(norms=not free_norms),
            ablate=REAL if check else None,
            text=_contexts(models[0], text),
        )
    _show_pair(found, out_folder, json=json)


def _contexts(model: LoadedModel, text: str | None) -> Sequences | None:
    """Sequences of a text in which features are looked for."""
    if text is None:
        return None
    from gossamer.evaluate.texts import held_out_text

    return held_out_text(model, None if text == LANGUAGE else text, n=CONTEXT_SEQUENCES, length=None, seed=0).sequences


def _require_one_question(prompt: str | None, target: str | None, task: str | None) -> None:
    if task is None and (prompt is None or target is None):
        raise GossamerError("Give a --prompt and the --target behind it, or a --task.")
    if task is not None and (prompt is not None or target is not None):
        raise GossamerError("A task brings its own prompts and targets; leave out --prompt and --target.")


def _require_of_a_prompt(task: str | None, given: list[str]) -> None:
    if task is not None and given:
        raise GossamerError(f"{', '.join(given)} would change what one prompt is asked; leave it out with --task.")


def _require_readable(text: str | None) -> None:
    if text not in (None, LANGUAGE, "self") and not Path(str(text)).exists():
        raise GossamerError(
            f"There is no file or folder {text}; give one, or 'language' for held-out text of the bundled language."
        )


def _require_transcoders_to_be_wanted(named: list[str] | None, text: str | None, *, left_out: bool) -> None:
    if left_out and (named or text):
        other = "--transcoder" if named else "--text"
        raise GossamerError(f"{other} is about features, which --no-transcoders leaves out; choose one of the two.")


def _transcoders(
    models: list[LoadedModel], named: list[str], *, left_out: bool, for_task: bool
) -> TranscoderPair | None:
    """Those named or none; without a wish the bundled ones, loaded once for a task, for a prompt if it has any use."""
    from gossamer.attribution.pair import TranscoderPair

    if left_out:
        return TranscoderPair()
    return find_transcoders(models[0], models[1], named) if named or for_task else None


def _hop(text: str | None) -> Hop | None:
    from gossamer.attribution.hops import Hop

    if text is None:
        return None
    parts = text.replace("→", ",").split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise GossamerError(f"A hop is two positions, key and query, such as 5,8, not {text!r}.")
    return Hop(int(parts[0]), int(parts[1]))


def _over_task(
    models: list[LoadedModel], name: str, size: tuple[int, int], share: float, transcoders: TranscoderPair | None
) -> TaskHeads:
    from gossamer.attribution.task_heads import attribute_task
    from gossamer.tasks import get

    task = get(name, models[0].tokenizer, size[0], seed=size[1])
    with progress() as bar:
        done = bar.add_task(f"attributing {name}", total=len(task))
        return attribute_task(
            models[0],
            models[1],
            task,
            share=share,
            transcoders=transcoders,
            tell=lambda number, _: bar.update(done, completed=number),
        )


def _show_task(found: TaskHeads, folder: Path | None, *, json: bool) -> None:
    section = task_section(found)
    if folder is not None:
        found.save(folder / "heads.safetensors")
        title = f"Heads that carry the answer: {found.task}"
        page = Report(title, "One line a prompt.", {"heads": section}, data="heads.json").write(folder, found.to_dict())
        err.print(escape(f"The results are in {folder}, as a page in {page}."))
    if json:
        say_json(found.to_dict())
    else:
        show_section(section)


def _show_pair(found: AttributedPair, folder: Path | None, *, json: bool) -> None:
    if folder is not None:
        page = save(found, folder)
        err.print(escape(f"The results are in {folder}, as a page in {page}."))
    if json:
        say_json(pair_data(found))
        return
    for section in sections(found).values():
        show_section(section)


def save(found: AttributedPair, folder: Path) -> Path:
    """The reloadable result, JSON, its figures in three formats, the graphs for other viewers, and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(found, folder, suffixes=SUFFIXES)
    found.save(folder / ATTRIBUTION)
    _save_graphs(found, folder)
    difference = found.difference()
    if difference is not None:
        difference.save(folder / DIFFERENCE)
    tokens = found.sparse.tokens
    introduction = f"{found.dense.tokens.model} and {tokens.model} on one prompt. " + " ".join(
        f"{meaning}." for meaning in meanings(found).values()
    )
    report = Report(f"Why {tokens.target.text!r}?", introduction, sections(found, pictures), data="attribution.json")
    return report.write(folder, pair_data(found))


def _save_graphs(found: AttributedPair, folder: Path) -> None:
    from gossamer.attribution.export import write_circuit_tracer

    for role, explanation in (("dense", found.dense), ("sparse", found.sparse)):
        features = explanation.features
        if features is not None:
            write_circuit_tracer(
                features.graph,
                folder / "graphs",
                slug=role,
                scan=f"gossamer-{role}",
                loadings=features.loadings,
                clusters=features.clusters,
            )
