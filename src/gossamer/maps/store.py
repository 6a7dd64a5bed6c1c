"""The store of attention maps: open edges and their weights, head by head, and what each row was before the gate.

An edge is one (prompt, layer, head, query, key) through which a head reads, with the weight its value is multiplied
by. Edges are sorted in that order, so a head's edges are a slice. Memory is eight bytes an edge, plus eight or so a
row (prompt, layer, head, query) for what the edges cannot tell:

    entropy   of the softmax before the gate, in nats
    first     the softmax's mass on the first token of the document, before the gate
    below     the mass of open edges lighter than `floor`, which are not stored one by one, and their number

So the row sum of what a head carries is the sum of its stored weights plus `below`, and nothing is lost silently.
The floor is 0 for gated models. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError, nearest
from gossamer.files import atomic_folder
from gossamer.maps.sealed import read_sealed, write_sealed

FORMAT, VERSION = "gossamer attention maps", 1
EDGES_FILE, ROWS_FILE = "edges.parquet", "rows.parquet"
_COLUMNS = ("offsets", "query", "key", "weight", "rows")

Array = NDArray[Any]
Head = tuple[int, int]


def head_name(layer: int, head: int) -> str:
    """`L5H1`."""
    return f"L{layer}H{head}"


def parse_head(name: str) -> Head:
    """`L5H1` (or `5.1`) as (layer, head)."""
    found = re.fullmatch(r"[lL]?(\d+)(?:[hH]|\.|-[hH])(\d+)", name.strip())
    if found is None:
        raise GossamerError(f"{name!r} is not a head; write it as L5H1.")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges with all their coordinates, one array each; what slices of maps return."""

    prompt: Array
    layer: Array
    head: Array
    query: Array
    key: Array
    weight: Array

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, chosen: Array | slice) -> Edges:
        return Edges(*(getattr(self, part.name)[chosen] for part in fields(self)))


@dataclass(frozen=True, eq=False)
class Rows:
    """What the edges cannot tell of each row: arrays [L, H, P] over the P positions of all prompts in a row."""

    entropy: NDArray[np.float16]
    first: NDArray[np.float16]
    below: NDArray[np.float32]
    n_below: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of all heads on some prompts. See the module's docstring for what is stored."""

    model: str
    tokens: tuple[tuple[str, ...], ...]
    ids: tuple[tuple[int, ...], ...]
    documents: tuple[tuple[int, ...], ...]  # where documents begin in each prompt; attention stays inside one
    n_layers: int
    n_heads: int
    gated: bool
    floor: float
    offsets: NDArray[np.int64]  # [prompts x layers x heads + 1]
    query: Array
    key: Array
    weight: NDArray[np.float32]
    rows: Rows
    texts: tuple[
        str, ...
    ] = ()  # each prompt as a whole: its tokens in a row, unless given (characters can span tokens)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_positions = sum(self.lengths)
        shape = (self.n_layers, self.n_heads, n_positions)
        assert len(self.texts) in (0, len(self.ids))
        assert len(self.ids) == len(self.tokens) == len(self.documents)
        assert all(len(ids) == len(tokens) for ids, tokens in zip(self.ids, self.tokens, strict=True))
        assert all(starts and starts[0] == 0 for starts in self.documents)
        assert self.offsets.shape == (self.n_prompts * self.n_layers * self.n_heads + 1,)
        assert self.offsets[-1] == len(self.query) == len(self.key) == len(self.weight)
        assert all(getattr(self.rows, part.name).shape == shape for part in fields(self.rows))

    @property
    def n_prompts(self) -> int:
        """How many prompts."""
        return len(self.tokens)

    def text(self, prompt: int = 0) -> str:
        """A prompt as a whole, though a character in it may span tokens."""
        return self.texts[prompt] if self.texts else "".join(self.tokens[prompt])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each prompt."""
        return tuple(map(len, self.tokens))

    @property
    def n_edges(self) -> int:
        """Stored edges."""
        return len(self.weight)

    @property
    def heads(self) -> list[Head]:
        """All (layer, head), layer by layer."""
        return [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]

    @property
    def names(self) -> list[str]:
        """All heads' names, layer by layer."""
        return [head_name(*head) for head in self.heads]

    @cached_property
    def first_position(self) -> NDArray[np.int64]:
        """Where each prompt's positions begin among all positions [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def document_start(self) -> NDArray[np.int64]:
        """For each position of all prompts [P], the first token of its document, counted within its prompt."""
        starts = []
        for length, documents in zip(self.lengths, self.documents, strict=True):
            bounds = np.array([*documents, length])
            starts.append(np.repeat(bounds[:-1], np.diff(bounds)))
        return np.concatenate(starts).astype(np.int64) if starts else np.zeros(0, dtype=np.int64)

    @cached_property
    def n_allowed(self) -> NDArray[np.int64]:
        """For each position of all prompts [P], how many keys it may attend to."""
        within = np.concatenate([np.arange(length) for length in self.lengths])
        return within - self.document_start + 1

    def require_head(self, layer: int, head: int) -> Head:
        """The head, if there is one."""
        if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads):
            last = head_name(self.n_layers - 1, self.n_heads - 1)
            raise GossamerError(f"There is no head {head_name(layer, head)}; the maps of {self.model} go up to {last}.")
        return layer, head

    def span(self, layer: int, head: int, prompt: int = 0) -> slice:
        """Where one head's edges on one prompt lie in `query`, `key` and `weight`."""
        self.require_head(layer, head)
        if not 0 <= prompt < self.n_prompts:
            raise GossamerError(f"There is no prompt {prompt}; the maps hold {self.n_prompts}, counted from 0.")
        index = (prompt * self.n_layers + layer) * self.n_heads + head
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def head(self, layer: int, head: int, prompt: int = 0) -> Edges:
        """One head's edges on one prompt."""
        span = self.span(layer, head, prompt)
        n = span.stop - span.start
        where = [np.full(n, value, dtype=np.uint16) for value in (prompt, layer, head)]
        return Edges(where[0], where[1], where[2], self.query[span], self.key[span], self.weight[span])

    def matrix(self, layer: int, head: int, prompt: int = 0) -> NDArray[np.float32]:
        """One head's map on one prompt as a matrix [query, key]; zero where no edge is stored."""
        span = self.span(layer, head, prompt)
        matrix_QK = np.zeros((self.lengths[prompt],) * 2, dtype=np.float32)
        matrix_QK[self.query[span], self.key[span]] = self.weight[span]
        return matrix_QK

    @cached_property
    def head_of_edge(self) -> NDArray[np.int32]:
        """For each edge its head, counted layer by layer; prompts of one head share the number."""
        per_prompt = self.n_layers * self.n_heads
        heads = np.tile(np.arange(per_prompt, dtype=np.int32), self.n_prompts)
        return np.repeat(heads, np.diff(self.offsets))

    @cached_property
    def prompt_of_edge(self) -> NDArray[np.uint16]:
        """For each edge its prompt."""
        prompts = np.repeat(np.arange(self.n_prompts, dtype=np.uint16), self.n_layers * self.n_heads)
        return np.repeat(prompts, np.diff(self.offsets))

    @cached_property
    def query_position(self) -> NDArray[np.int64]:
        """For each edge its query, counted over the positions of all prompts."""
        return self.first_position[self.prompt_of_edge] + self.query

    def all_edges(self) -> Edges:
        """Every edge with its coordinates."""
        layer, head = np.divmod(self.head_of_edge, self.n_heads)
        kinds = np.uint16
        return Edges(self.prompt_of_edge, layer.astype(kinds), head.astype(kinds), self.query, self.key, self.weight)

    def edges(
        self,
        *,
        heads: Sequence[Head] | None = None,
        prompt: int | None = None,
        query: int | None = None,
        key: int | None = None,
        token: str | None = None,
    ) -> Edges:
        """The edges of some heads, of a query or key position (negative: from the prompt's end), or at a token.

        `token` keeps edges whose query or key is that token, as the maps spell it or without its surrounding spaces.
        """
        chosen = self._of_heads(heads, prompt)
        lengths = np.array(self.lengths)[chosen.prompt]
        keep = np.ones(len(chosen), dtype=bool)
        for wanted, actual in ((query, chosen.query), (key, chosen.key)):
            if wanted is not None:
                keep &= actual == np.where(wanted < 0, lengths + wanted, wanted)
        if token is not None:
            at_token = self._positions_of(token)
            first = self.first_position[chosen.prompt]
            keep &= at_token[first + chosen.query] | at_token[first + chosen.key]
        return chosen[keep]

    def _of_heads(self, heads: Sequence[Head] | None, prompt: int | None) -> Edges:
        if heads is None and prompt is None:
            return self.all_edges()
        prompts = range(self.n_prompts) if prompt is None else [prompt]
        parts = [self.head(*head, one) for one in prompts for head in (self.heads if heads is None else heads)]
        names = [part.name for part in fields(Edges)]
        return Edges(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def _positions_of(self, token: str) -> NDArray[np.bool_]:
        known = [piece for prompt in self.tokens for piece in prompt]
        found = np.array([token in (piece, piece.strip()) for piece in known], dtype=bool)
        if not found.any():
            raise GossamerError(f"No prompt of these maps holds the token {token!r}.{nearest(token, set(known))}")
        return found

    def row_sums(self) -> NDArray[np.float64]:
        """What each row carries [L, H, P]: the stored weights and the mass below the floor."""
        n_positions = sum(self.lengths)
        index = self.head_of_edge.astype(np.int64) * n_positions + self.query_position
        stored: Array = np.bincount(index, self.weight, minlength=self.n_layers * self.n_heads * n_positions)
        return stored.reshape(self.rows.below.shape) + self.rows.below.astype(np.float64)

    def open_edges(self) -> NDArray[np.int64]:
        """Open edges of each row [L, H, P], those below the floor included."""
        n_positions = sum(self.lengths)
        index = self.head_of_edge.astype(np.int64) * n_positions + self.query_position
        stored = np.bincount(index, minlength=self.n_layers * self.n_heads * n_positions)
        return stored.reshape(self.rows.below.shape) + self.rows.n_below

    def density(self) -> float:
        """Open edges as a share of the allowed pairs."""
        allowed = int(self.n_allowed.sum()) * self.n_layers * self.n_heads
        return (self.n_edges + int(self.rows.n_below.sum(dtype=np.int64))) / allowed

    def mass_below_floor(self) -> float:
        """Share of all carried mass that lies on edges too light to be stored."""
        carried = float(self.weight.sum(dtype=np.float64)) + float(self.rows.below.sum(dtype=np.float64))
        return float(self.rows.below.sum(dtype=np.float64)) / carried if carried else 0.0

    def select(self, prompts: Sequence[int]) -> AttentionMaps:
        """The maps of some prompts only."""
        per_prompt = self.n_layers * self.n_heads
        counts = np.diff(self.offsets).reshape(self.n_prompts, per_prompt)[list(prompts)].ravel()
        bounds = [(self.offsets[one * per_prompt], self.offsets[(one + 1) * per_prompt]) for one in prompts]
        pick = np.concatenate([np.arange(*bound) for bound in bounds])
        at = np.concatenate([np.arange(*self.first_position[one : one + 2]) for one in prompts])
        rows = Rows(*(getattr(self.rows, part.name)[:, :, at] for part in fields(Rows)))
        return AttentionMaps(
            model=self.model,
            tokens=tuple(self.tokens[one] for one in prompts),
            ids=tuple(self.ids[one] for one in prompts),
            texts=tuple(self.texts[one] for one in prompts) if self.texts else (),
            documents=tuple(self.documents[one] for one in prompts),
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            gated=self.gated,
            floor=self.floor,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            query=self.query[pick],
            key=self.key[pick],
            weight=self.weight[pick],
            rows=rows,
            provenance=self.provenance,
        )

    def save(self, folder: str | Path) -> Path:
        """Write a folder: `edges.parquet`, one row an edge, and `rows.parquet`, both sealed; tokens in the metadata."""
        edges = self.all_edges()
        with atomic_folder(folder) as temporary:
            seal = write_sealed(
                temporary / EDGES_FILE,
                {part.name: getattr(edges, part.name) for part in fields(edges)},
                self._about(),
                repeated=["prompt", "layer", "head"],
                encodings={"query": "DELTA_BINARY_PACKED", "key": "BYTE_STREAM_SPLIT", "weight": "BYTE_STREAM_SPLIT"},
            )
            write_sealed(
                temporary / ROWS_FILE,
                {part.name: getattr(self.rows, part.name).ravel() for part in fields(self.rows)},
                {"format": FORMAT + ": rows", "version": VERSION, "edges": seal},
                repeated=["n_below"],
                encodings={"entropy": "BYTE_STREAM_SPLIT", "first": "BYTE_STREAM_SPLIT", "below": "BYTE_STREAM_SPLIT"},
            )
        return Path(folder)

    def _about(self) -> dict[str, Any]:
        plain = ("model", "tokens", "ids", "texts", "documents", "n_layers", "n_heads", "gated", "floor", "provenance")
        return {"format": FORMAT, "version": VERSION} | {name: getattr(self, name) for name in plain}

    @classmethod
    def load(cls, folder: str | Path) -> AttentionMaps:
        """Read what `save` wrote; a file of another version or with a flipped byte is refused."""
        edges, about, seal = read_sealed(Path(folder) / EDGES_FILE, format_name=FORMAT, version=VERSION)
        rows, about_rows, _ = read_sealed(Path(folder) / ROWS_FILE, format_name=FORMAT + ": rows", version=VERSION)
        if about_rows.get("edges") != seal:
            raise GossamerError(f"{EDGES_FILE} and {ROWS_FILE} in {folder} do not belong together; capture them again.")
        about = {name: value for name, value in about.items() if name not in ("format", "version")}
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(about) - known):
            raise GossamerError(f"{folder} has the unknown field {unknown[0]!r}.{nearest(unknown[0], known)}")
        if missing := sorted(known - set(about) - {"texts", *_COLUMNS}):
            raise GossamerError(f"{folder} lacks the field {missing[0]!r}; capture the maps again.")
        about["texts"] = tuple(about.get("texts", ()))
        for name in ("tokens", "ids", "documents"):
            about[name] = tuple(map(tuple, about[name]))
        n_maps = len(about["tokens"]) * about["n_layers"] * about["n_heads"]
        column = {name: edges.column(name).to_numpy() for name in ("prompt", "layer", "head", "query", "key", "weight")}
        index = (column["prompt"].astype(np.int64) * about["n_layers"] + column["layer"]) * about["n_heads"]
        counts = np.bincount(index + column["head"], minlength=n_maps)
        shape = (about["n_layers"], about["n_heads"], -1)
        return cls(
            **about,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            **{name: column[name] for name in ("query", "key", "weight")},
            rows=Rows(*(rows.column(part.name).to_numpy().reshape(shape) for part in fields(Rows))),
        )


def smallest_index(length: int) -> type[np.uint16] | type[np.uint32]:
    """The type that positions below `length` are stored in."""
    return np.uint16 if length <= np.iinfo(np.uint16).max + 1 else np.uint32


def iterate_prompts(maps: AttentionMaps) -> Iterator[tuple[int, slice]]:
    """Each prompt with where its positions lie among those of all prompts."""
    for prompt in range(maps.n_prompts):
        yield prompt, slice(int(maps.first_position[prompt]), int(maps.first_position[prompt + 1]))
