"""`gossamer attribute` on a tiny random pair and on the bundled dense model with gates: what it writes and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.attention import gates_of
from gossamer.attribution.diff import GraphDiff
from gossamer.attribution.pair import AttributedPair
from gossamer.attribution.task_heads import TaskHeads
from gossamer.cli.figure import ATTRIBUTION
from gossamer.transcoders import from_mlp

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest
PROMPT = 'The opposite of "large" is "'
ASKED = ["--prompt", PROMPT, "--target", "small"]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The bundled dense model, and the same with gates that shut some of its edges; no transcoders known for either."""
    folder = tmp_path_factory.mktemp("bundled")
    gs.load("bundled/dense").save(folder / "dense")
    gs.gate(gs.load("bundled/dense"), gs.GateConfig(offset=2.0)).save(folder / "gated")
    return str(folder / "dense"), str(folder / "gated")


def test_the_bundled_models_answer(bundled: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    done = gossamer("attribute", *bundled, *ASKED, "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert json.loads((tmp_path / "attribution.json").read_text("utf-8")) == printed
    assert printed["hop"] == {"key": 5, "query": 8}  # from `large`, found and not presumed
    assert printed["tokens"][5] == "large"
    found = AttributedPair.load(tmp_path / "attribution.safetensors")
    for role in ("dense", "sparse"):
        for name, carried in printed[role]["heads"].items():
            heads = found.carriers(role, name)  # type: ignore[arg-type]
            assert carried["n"] == len(heads) == len(carried["heads"])
            assert sum(abs(head["contribution"]) for head in carried["heads"]) >= 0.8 * carried["gross"]
    lost = {hop["key"]: hop["lost when shut"] for hop in printed["sparse"]["hops into the answer"]}
    assert max((key for key in lost if key not in (0, 8)), key=lost.__getitem__) == 5
    assert printed["sparse"]["open edges"] < printed["dense"]["open edges"] == 144 * 45
    assert {path.name for path in tmp_path.iterdir()} >= {"sketch.png", "sketch.svg", "sketch.pdf", "index.html"}
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "Why &#x27;small&#x27;?" in page
    assert "L0H8" in page


def test_transcoders_add_graphs(pair: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    """ReLU transcoders copied from a ReLU model's MLPs, so that graphs have no error."""
    dense, sparse = (made_relu(folder, tmp_path / name) for folder, name in zip(pair, ("dense", "sparse"), strict=True))
    given = ["--transcoder", sparse[1], "--transcoder", dense[1]]  # each is recognised by the model it was made for
    out = tmp_path / "out"
    done = gossamer("attribute", dense[0], sparse[0], *ASKED, *given, "--out", out, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert printed["measure"] == "graph"
    for role in ("dense", "sparse"):
        graph = printed[role]["graph"]
        assert graph["scores"]["error_share"] < 0.01  # that of the first position, where features count as off
        for edge in graph["strongest edges"]:
            assert set(edge) == {"source", "target", "effect", "no head", "other positions", "heads"}
        exported = json.loads((out / "graphs" / f"{role}.json").read_text("utf-8"))
        assert any("heads" in link for link in exported["links"])
    assert "Graphs of features" in (out / "index.html").read_text("utf-8")
    assert "error nodes&#x27; share" in (out / "index.html").read_text("utf-8")
    drawn = (out / "sketch.svg").read_text("utf-8")
    for part in ("80 % of", "by graph", "Error nodes' share of the logits' inputs: ", "80 % by "):
        assert part in drawn
    difference, found = GraphDiff.load(out / "graph-diff.safetensors"), AttributedPair.load(out / ATTRIBUTION)
    assert difference == found.difference()
    written = printed["graph difference"]
    assert len(written["nodes"]) == sum(written["counts"]["nodes"].values()) == len(difference.nodes)
    assert sum(written["counts"]["edges"].values()) == len(difference.edges)
    assert written["nodes"][0].keys() == {"kind", "layer", "position", "number", "first", "second", "status"}
    without = gossamer("attribute", dense[0], sparse[0], *ASKED, *given, "--no-transcoders")
    assert "--transcoder is about features, which --no-transcoders leaves out" in " ".join(without.err.split())
    unfit = gossamer("attribute", dense[0], sparse[0], *ASKED, *given, "--kind", "logit")
    assert "not a logit; leave out the transcoders" in " ".join(unfit.err.split())
    refused = gossamer("attribute", dense[0], sparse[0], *ASKED, *given, "--transcoder", dense[1])
    assert "Both models have transcoders already" in " ".join(refused.err.split())
    foreign = gossamer("attribute", *pair, *ASKED, "--transcoder", dense[1])
    assert foreign.code == 2
    assert "These transcoders" in " ".join(foreign.err.split())


def made_relu(folder: str, out: Path) -> tuple[str, str]:
    """A copy of a model with ReLU MLPs, and transcoders that are these MLPs."""
    model = gs.load(folder)
    model.hf.config.activation_function = "relu"
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.mul_(1.5)
    model.save(out / "model")
    made = gs.load(out / "model")
    from_mlp(made).save(out / "transcoders")
    return str(out / "model"), str(out / "transcoders")


def test_a_task_prints_medians_and_every_prompt(bundled: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    arguments = [*bundled, "--task", "opposites", "--n", 3, "--out", tmp_path]
    done = gossamer("attribute", *arguments, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert printed == json.loads((tmp_path / "heads.json").read_text("utf-8"))
    assert len(printed["prompts"]) == 3
    for row in printed["prompts"]:
        word = row["prompt"].split('"')[1]
        assert row["key token"].strip() == word  # what carries the answer is the word whose opposite is asked for
    dense = sorted(row["dense"]["gradient"] for row in printed["prompts"])
    assert printed["medians"]["gradient"]["dense"] == dense[1]
    assert TaskHeads.load(tmp_path / "heads.safetensors").to_dict()["medians"] == printed["medians"]
    shown = gossamer("attribute", *arguments).out
    assert "median" in shown


def test_errors_of_the_graphs_stand_beside_a_tasks_heads(gossamer: Call) -> None:
    shown = " ".join(
        gossamer("attribute", "bundled/dense", "bundled/sparse", "--task", "opposites", "--n", 1).out.split()
    )
    assert "error nodes" in shown
    assert re.search(r"\d % / \d+ %", shown)
    assert "held: gates, patterns, norms" in shown


def test_options_reach_the_result(bundled: tuple[str, str], gossamer: Call) -> None:
    options = ["--instead", "early", "--hop", "2,8", "--share", 0.5]
    printed = json.loads(gossamer("attribute", *bundled, *ASKED, *options, "--json").out)
    assert printed["target"] == "logit difference of 'small' against 'early'"
    assert printed["hop"] == {"key": 2, "query": 8}
    assert printed["share"] == 0.5
    shown = gossamer("attribute", *bundled, *ASKED, *options).out
    assert "as asked for" in shown
    assert "the sparse model's target loses most without 5 → 8" in " ".join(shown.split())


@pytest.mark.parametrize("kind", ["probability", "logit", "log probability"])
def test_what_no_graph_explains_is_attributed_without_one_and_that_is_said(kind: str, gossamer: Call) -> None:
    """The bundled pair has transcoders; the reason why they are not used is in the tables and in the data."""
    asked = ["attribute", "bundled/dense", "bundled/sparse", *ASKED, "--kind", kind]
    printed = json.loads(gossamer(*asked, "--json").out)
    assert printed["target"] == f"{kind} of 'small'"
    assert list(printed["measures"]) == ["gradient", "direct"]
    assert printed["measure"] == "gradient"
    assert printed["no graph"] == (
        f"There is no graph of features: graphs explain a centred logit or a logit difference, not a {kind}."
    )
    assert printed["no graph"] in " ".join(gossamer(*asked).out.split())


def test_transcoders_can_be_left_out(gossamer: Call) -> None:
    asked = ["attribute", "bundled/dense", "bundled/sparse", *ASKED, "--no-transcoders"]
    printed = json.loads(gossamer(*asked, "--json").out)
    assert list(printed["measures"]) == ["gradient", "direct"]
    assert "no graph" not in printed


def test_edges_are_attributed_by_the_method_asked_for(bundled: tuple[str, str], gossamer: Call) -> None:
    def totals(*options: str) -> tuple[float, str]:
        printed = json.loads(gossamer("attribute", *bundled, *ASKED, "--hop", "5,8", *options, "--json").out)
        return printed["dense"]["heads"]["gradient"]["total"], printed["measures"]["gradient"]

    plain, integrated, free = totals(), totals("--method", "integrated"), totals("--free-norms")
    assert len({round(total, 4) for total, _ in (plain, integrated, free)}) == 3
    assert "on the way from no attention" in integrated[1]
    assert plain[1].endswith("held: gates, patterns, norms")
    assert free[1].endswith("held: gates, patterns")


def test_check_reports_the_agreement_with_exact_ablation(pair: tuple[str, str], gossamer: Call) -> None:
    printed = json.loads(gossamer("attribute", *pair, *ASKED, "--check", "--json").out)
    for role in ("dense", "sparse"):
        assert printed[role]["agreement with exact ablation"]["edges"] == printed[role]["open edges"]
    assert "exact ablation" in gossamer("attribute", *pair, *ASKED, "--check").out


REFUSALS = {
    "two tokens": (["--prompt", PROMPT, "--target", "small house"], "2 tokens behind this prompt ('small', ' house')"),
    "too long": (["--prompt", "of" + " of" * 200, "--target", " of"], "reads at most 128; shorten it"),
    "nothing": (["--prompt", "", "--target", "small"], "The prompt is empty"),
    "no text": (["--text", "/nonexistent", *ASKED], "or 'language' for held-out text"),
    "no features": (["--text", "language", *ASKED], "without transcoders there are none"),
    "method": (["--method", "integrate", *ASKED], "Did you mean 'integrated'"),
    "left out twice": (["--no-transcoders", "--text", "language", *ASKED], "--text is about features"),
    "of a prompt": (["--task", "opposites", "--hop", "5,8", "--check"], "--hop, --check would change"),
    "no target": (["--prompt", PROMPT], "--target"),
    "both": (["--task", "opposites", *ASKED], "A task brings its own prompts"),
    "no hop": (["--hop", "5-8", *ASKED], "such as 5,8"),
    "backwards": (["--hop", "8,5", *ASKED], "There is no hop 8 → 5"),
    "kind": (["--kind", "logits", *ASKED], "Did you mean 'logit'"),
    "measure": (["--measure", "graph", *ASKED, "--out", "unused"], "There is no measure 'graph'"),
    "share": (["--share", 1.5, *ASKED], "The share to cover is between 0 and 1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_answered_with_a_sentence(
    case: str, bundled: tuple[str, str], gossamer: Call, tmp_path: Path
) -> None:
    arguments, sentence = REFUSALS[case]
    arguments = [tmp_path if argument == "unused" else argument for argument in arguments]
    refused = gossamer("attribute", *bundled, *arguments)
    assert refused.code == 2
    assert sentence in " ".join(refused.err.split())
    assert not list(tmp_path.iterdir())


def test_a_dead_position_is_named(bundled: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    """Gates that shut everything: nothing reaches the answer's position."""
    model = gs.gate(gs.load("bundled/dense"), gs.GateConfig())
    for gate in gates_of(model.hf):
        gate.offset_H.data.fill_(-1000.0)
    model.save(tmp_path / "dead")
    refused = gossamer("attribute", bundled[0], tmp_path / "dead", *ASKED)
    assert refused.code == 2
    assert "carries anything into position 8" in " ".join(refused.err.split())
