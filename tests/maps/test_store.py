"""Maps survive their files exactly, slices are what they say, and a damaged or foreign file is refused."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import gossamer.maps.store as store
from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, from_matrices, parse_head
from gossamer.maps.builder import row_entropy

WORDS = ("<s>", " a", "\n", "🦎", " a", "שלום", "$x^{$", "<script>")


def random_maps(*, floor: float = 0.0, n_prompts: int = 2) -> AttentionMaps:
    rng = np.random.default_rng(0)
    softmax = [np.tril(rng.random((2, 3, 8, 8))) for _ in range(n_prompts)]
    softmax = [rows / rows.sum(-1, keepdims=True) for rows in softmax]
    weights = [rows * (rng.random(rows.shape) < 0.3) for rows in softmax]
    return from_matrices(
        [rows.astype(np.float32) for rows in weights],
        softmax=softmax,
        ids=[[0, 1, 2, 3, 1, 4, 5, 6]] * n_prompts,
        tokens=[WORDS] * n_prompts,
        gated=True,
        floor=floor,
        provenance={"seed": 0},
    )


def assert_same(one: AttentionMaps, two: AttentionMaps) -> None:
    for part in fields(AttentionMaps):
        if part.name == "rows":
            continue
        mine, other = getattr(one, part.name), getattr(two, part.name)
        np.testing.assert_array_equal(mine, other) if isinstance(mine, np.ndarray) else None
        assert isinstance(mine, np.ndarray) or mine == other, part.name
    for part in fields(one.rows):
        mine, other = getattr(one.rows, part.name), getattr(two.rows, part.name)
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_round_trip(tmp_path: Path, floor: float) -> None:
    maps = random_maps(floor=floor)
    assert 0 < maps.density() < 1
    assert_same(AttentionMaps.load(maps.save(tmp_path / "maps")), maps)


def test_a_model_that_carries_nothing_round_trips(tmp_path: Path) -> None:
    empty = from_matrices([np.zeros((1, 2, 3, 3))], ids=[[1, 2, 3]], gated=True)
    assert_same(AttentionMaps.load(empty.save(tmp_path / "maps")), empty)
    assert empty.n_edges == 0
    assert empty.mass_below_floor() == 0


def test_other_readers_find_one_row_an_edge(tmp_path: Path) -> None:
    maps = random_maps()
    table = pq.read_table(maps.save(tmp_path / "maps") / "edges.parquet")
    assert table.column_names == ["prompt", "layer", "head", "query", "key", "weight"]
    row = {name: table.column(name)[5].as_py() for name in table.column_names}
    matrix = maps.matrix(row["layer"], row["head"], row["prompt"])
    assert matrix[row["query"], row["key"]] == np.float32(row["weight"])
    assert "🦎" in pq.read_metadata(tmp_path / "maps" / "edges.parquet").metadata[b"gossamer"].decode()


@pytest.mark.parametrize("name", ["edges.parquet", "rows.parquet"])
def test_any_flipped_byte_is_noticed(tmp_path: Path, name: str) -> None:
    folder = random_maps().save(tmp_path / "maps")
    intact = (folder / name).read_bytes()
    for position in range(0, len(intact), max(1, len(intact) // 150)):
        damaged = bytearray(intact)
        damaged[position] ^= 4
        (folder / name).write_bytes(damaged)
        with pytest.raises(GossamerError, match=r"damaged|no seal"):
            AttentionMaps.load(folder)
    (folder / name).write_bytes(intact)
    AttentionMaps.load(folder)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "VERSION", 2)
    folder = random_maps().save(tmp_path / "maps")
    monkeypatch.undo()
    with pytest.raises(GossamerError, match="version 2"):
        AttentionMaps.load(folder)


def test_an_unknown_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = AttentionMaps._about
    monkeypatch.setattr(AttentionMaps, "_about", lambda self: about(self) | {"flor": 1})
    folder = random_maps().save(tmp_path / "maps")
    with pytest.raises(GossamerError, match="unknown field 'flor'"):
        AttentionMaps.load(folder)


def test_files_of_two_captures_do_not_mix(tmp_path: Path) -> None:
    one, other = random_maps().save(tmp_path / "one"), random_maps(floor=0.2).save(tmp_path / "other")
    shutil.copy(other / "rows.parquet", one / "rows.parquet")
    with pytest.raises(GossamerError, match="belong together"):
        AttentionMaps.load(one)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="could not be read"):
        AttentionMaps.load(tmp_path / "nowhere")


def test_slices_by_head_position_and_token() -> None:
    maps = random_maps()
    assert len(maps.all_edges()) == maps.n_edges
    of_head = maps.edges(heads=[(1, 2)])
    assert len(of_head) == len(maps.head(1, 2, 0)) + len(maps.head(1, 2, 1)) > 0
    assert set(of_head.layer) == {1}
    last = maps.edges(query=-1, prompt=0)
    assert set(last.query) == {7}
    assert len(last) == sum(np.count_nonzero(maps.matrix(*head)[7]) for head in maps.heads)
    assert set(maps.edges(key=3).key) == {3}
    at_a = maps.edges(token="a")
    assert len(at_a) > 0
    assert all({int(query), int(key)} & {1, 4} for query, key in zip(at_a.query, at_a.key, strict=True))
    with pytest.raises(GossamerError, match="Did you mean '<script>'"):
        maps.edges(token="<skript>")


def test_prompts_can_be_selected() -> None:
    maps = random_maps(n_prompts=3)
    both = maps.select([2, 0])
    for layer, head in maps.heads:
        np.testing.assert_array_equal(both.matrix(layer, head, 0), maps.matrix(layer, head, 2))
    np.testing.assert_array_equal(both.rows.entropy[:, :, :8], maps.rows.entropy[:, :, 16:])
    assert_same(maps.select([0, 1, 2]), maps)


def test_allowed_keys_are_counted_inside_documents() -> None:
    maps = from_matrices([np.tril(np.ones((1, 1, 5, 5)))], ids=[[1, 2, 3, 4, 5]], documents=[(0, 3)])
    assert maps.n_allowed.tolist() == [1, 2, 3, 1, 2]


def test_row_entropy_by_hand() -> None:
    assert row_entropy(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist() == pytest.approx([np.log(2), 0])


@pytest.mark.parametrize(("name", "head"), [("L5H1", (5, 1)), ("l11h10", (11, 10)), ("L9-H7", (9, 7)), ("3.4", (3, 4))])
def test_names_of_heads(name: str, head: tuple[int, int]) -> None:
    assert parse_head(name) == head


@pytest.mark.parametrize("name", ["H5", "L5", "5", "L5H", "L5H1x", ""])
def test_what_is_no_head(name: str) -> None:
    with pytest.raises(GossamerError, match="is not a head"):
        parse_head(name)


def test_heads_and_prompts_that_do_not_exist() -> None:
    maps = random_maps()
    with pytest.raises(GossamerError, match="L2H0"):
        maps.matrix(2, 0)
    with pytest.raises(GossamerError, match="no prompt 2"):
        maps.matrix(0, 0, 2)


def test_matrices_that_are_no_causal_attention_are_refused() -> None:
    fine = np.tril(np.full((1, 1, 3, 3), 0.2))
    for wrong, message in (
        (np.where(fine == 0, 0.0, np.nan), "not finite"),
        (np.full((1, 1, 3, 3), 0.2), "after their query"),
        (-fine, "below zero"),
        (fine[0], "give an array"),
    ):
        with pytest.raises(GossamerError, match=message):
            from_matrices([fine, wrong], ids=[[1, 2, 3]] * 2)
        if wrong.ndim == 4:
            with pytest.raises(GossamerError, match=f"prompt 1.*{message}"):
                from_matrices([fine, fine], softmax=[fine, wrong], ids=[[1, 2, 3]] * 2)
    with pytest.raises(GossamerError, match="no matrices"):
        from_matrices([], ids=[])


def test_a_missing_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = AttentionMaps._about
    monkeypatch.setattr(AttentionMaps, "_about", lambda self: {k: v for k, v in about(self).items() if k != "gated"})
    folder = random_maps().save(tmp_path / "maps")
    with pytest.raises(GossamerError, match="lacks the field 'gated'"):
        AttentionMaps.load(folder)


def test_the_text_of_a_prompt_is_kept_as_a_whole(tmp_path: Path) -> None:
    weights = [np.eye(3)[None, None]] * 2
    maps = from_matrices(weights, ids=[[1, 2, 3]] * 2, tokens=[("a", "<C3>", "<A9>")] * 2, texts=["aé", "é"])
    again = AttentionMaps.load(maps.save(tmp_path / "maps"))
    assert [again.text(prompt) for prompt in (0, 1)] == ["aé", "é"]
    assert maps.select([1]).text() == "é"
    assert random_maps().text(1) == random_maps().select([1]).text() == "".join(WORDS)
