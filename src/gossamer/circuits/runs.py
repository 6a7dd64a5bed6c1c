"""Runs of clean and corrupt prompts that can be taken up again at any block, with many interventions in one batch.

Exact, yet fast, by four means:

1. prompts of one length whose clean and corrupt versions first differ at the same position form a group; what lies
   before that position is the same in both runs, is computed once, and serves as a key/value cache
2. the arguments of every block's call are recorded with ordinary hooks; a run with an intervention in layer l begins by
   calling block l directly on the recorded residual stream
3. a scenario is one intervention; many scenarios times all prompts of a group share one batched forward
4. of the last block only the last position, where the answer is read, is computed (the others give it keys and values),
   and only this position is unembedded, for a logit difference only into the answers

Where interventions act is said in `hooks`.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gossamer.attention import tape
from gossamer.circuits.caches import Capture, Captured, Known, Prefix, served
from gossamer.circuits.effect import Baseline, Floats
from gossamer.circuits.hooks import Edit, Run, Untouched, editing, first_of, recording
from gossamer.circuits.search import Progress
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.models.anatomy import Anatomy
from gossamer.tasks import Task, TokenBatch

Batch = int | Literal["auto"]
WhichRun = Literal["clean", "corrupt"]

MEMORY_BUDGET = 512 * 2**20
CACHE_BUDGET = 16 * 2**20  # of a processor: an MLP's hidden layer beyond this makes every elementwise step slower


@dataclass(frozen=True, eq=False)
class Group:
    """Prompts of one length whose clean and corrupt versions agree up to position `start`, and their two runs."""

    tokens: TokenBatch
    start: int
    prefix: Prefix
    clean: Run
    corrupt: Run

    def run(self, which: WhichRun) -> Run:
        """The clean or the corrupt run."""
        return self.clean if which == "clean" else self.corrupt


class PairedRuns:
    """The clean and corrupt runs of a task on one model, ready for interventions.

    `whole` keeps the positions before the first difference too, for interventions that change them (zero and mean
    ablation, single edges). `batch` bounds the rows (scenarios times prompts) of one forward; the recorded runs of all
    prompts are held in memory whatever it is.
    """

    def __init__(
        self,
        model: LoadedModel,
        task: Task,
        *,
        whole: bool = False,
        batch: Batch = "auto",
        progress: Progress | None = None,
    ) -> None:
        if batch != "auto" and batch < 1:
            raise GossamerError(f"A batch needs at least one row, but batch is {batch}; leave it at 'auto'.")
        self.model, self.task, self.whole = model, task, whole
        self.batch, self.progress = batch, progress
        self.parts: Anatomy = model.anatomy
        model.hf.eval()
        planned = list(self._grouped())
        self._require_room(planned)
        with torch.no_grad():
            self.groups = [self._record(tokens, start) for tokens, start in planned]
        self.baseline = Baseline(self._in_task_order("clean"), self._in_task_order("corrupt"))

    def _in_task_order(self, which: WhichRun) -> Floats:
        metric_N = np.zeros(len(self.task))
        for group in self.groups:
            metric_N[list(group.tokens.rows)] = group.run(which).metric_N.numpy()
        return metric_N

    # --- recording ---

    def _grouped(self) -> Iterator[tuple[TokenBatch, int]]:
        """Prompts by length and first difference, never more of them than a batch may hold."""
        for tokens in self.task.tokens:
            by_start = defaultdict(list)
            for index, start in enumerate(self._first_differences(tokens)):
                by_start[start].append(index)
            for start in sorted(by_start):
                step = self.rows_per_forward(tokens.clean_BT.shape[1], start)
                for first in range(0, len(by_start[start]), step):
                    yield select(tokens, by_start[start][first : first + step]), start

    def _require_room(self, planned: Sequence[tuple[TokenBatch, int]]) -> None:
        """Both runs of all prompts are held at once; better a sentence now than a killed process later."""
        per_token = 2 * 3 * self.parts.n_layers * self.parts.d_model * self.model.dtype.itemsize
        recorded = per_token * sum(len(tokens) * (tokens.clean_BT.shape[1] - start) for tokens, start in planned)
        memory = memory_of(self.model.device)
        if recorded > memory:
            raise GossamerError(
                f"The recorded runs of {len(self.task)} prompts of {self.task.name} take {recorded / 1e9:,.0f} GB, and"
                f" {self.model.device} has {memory / 1e9:,.0f} GB; take fewer or shorter prompts."
            )

    def _first_differences(self, tokens: TokenBatch) -> list[int]:
        if self.whole:
            return [0] * len(tokens)
        different_BT = tokens.clean_BT != tokens.corrupt_BT
        different_BT[:, -1] = True  # the answer's position is always run
        return [int(row.nonzero()[0]) for row in different_BT]

    def rows_per_forward(self, length: int, start: int, *, masked: bool = False) -> int:
        """How many rows one forward takes: as given, or what fits the memory budget.

        `masked` rows carry masks over the edges of every layer: one of those inside, one of those to shut.
        """
        if self.batch != "auto":
            return self.batch
        masks = 2 * self.parts.n_layers * self.parts.n_heads * length**2 if masked else 0
        n_new, config, size = length - start, self.model.hf.config, self.model.dtype.itemsize
        d_mlp = int(getattr(config, "intermediate_size", None) or 4 * self.parts.d_model)
        per_token = 8 * self.parts.d_model + 4 * d_mlp + 3 * self.parts.n_heads * length
        rows = MEMORY_BUDGET // ((n_new * per_token + 2 * int(config.vocab_size)) * size + masks)
        if self.model.device.type == "cpu":
            rows = min(rows, CACHE_BUDGET // (n_new * d_mlp * size))
        return max(1, rows)

    def _record(self, tokens: TokenBatch, start: int) -> Group:
        prefix = Prefix()
        if start:
            cache = DynamicCache()
            device = self.model.device
            self.model.hf(
                input_ids=tokens.clean_BT[:, :start].to(device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            prefix = Prefix(cache)
        clean = self._record_run(tokens, tokens.clean_BT, start, prefix)
        corrupt = self._record_run(tokens, tokens.corrupt_BT, start, prefix)
        group = Group(tokens, start, prefix, clean, corrupt)
        self._check(group)
        return group

    def _record_run(self, tokens: TokenBatch, ids_NT: Tensor, start: int, prefix: Prefix) -> Run:
        run = Run([], [], [], [], torch.empty(0))
        ids_NS = ids_NT[:, start:].to(self.model.device)
        with recording(self.parts, run):
            output = self.model.hf(
                input_ids=ids_NS, past_key_values=prefix.as_cache(), use_cache=True, logits_to_keep=1
            )
        if len(run.hidden_LNSD) != self.parts.n_layers:
            raise GossamerError(f"{self.model.name} does not call its blocks once each; it cannot be patched.")
        return replace(run, metric_N=self._score(output.logits[:, -1], tokens))

    def _check(self, group: Group) -> None:
        """Taking a run up again at its first block must lead to the same metric; else the model is refused."""
        again_N = self.restart(group, group.clean, 0, 1, Untouched())[0]
        tolerance = 1e-8 if self.model.dtype == torch.float64 else 0.05 if self.model.dtype != torch.float32 else 1e-3
        scale = float(group.clean.metric_N.abs().max()) + 1
        if float((again_N - group.clean.metric_N).abs().max()) <= tolerance * scale:
            return
        if self._flips(group, "clean")[0]:
            return  # a gate within rounding of zero explains it
        raise GossamerError(
            f"{self.model.name} does not give the same answer when its blocks are called one by one, so it"
            " cannot be patched; use a supported family."
        )

    # --- running ---

    def restart(self, group: Group, base: Run, layer: int, scenarios: int, edit: Edit | None) -> Tensor:
        """The metric [R, N] of `scenarios` copies of a run, taken up at block `layer` under an edit."""
        hidden = base.hidden_LNSD[layer].repeat(scenarios, 1, 1)
        last = self.parts.n_layers - 1
        with editing(self.parts, layer, scenarios, edit):
            for index in range(layer, last):
                hidden = self._block(index, hidden, base, group.prefix)
            if edit is not None and not edit.touches(last):
                hidden = self._last_position(hidden, base, group.prefix)
            else:
                hidden = self._block(last, hidden, base, group.prefix)
        return self.read(hidden, group.tokens, scenarios)

    def _block(self, index: int, hidden_BSD: Tensor, base: Run, prefix: Prefix) -> Tensor:
        args, kwargs = base.calls_L[index]
        return first_of(self.parts.blocks[index](hidden_BSD, *served(args, prefix), **served(kwargs, prefix)))

    def _last_position(self, hidden_BSD: Tensor, base: Run, prefix: Prefix) -> Tensor:
        """The last block's output [B, 1, D] for the last position, of the others only keys and values."""
        block, (args, kwargs) = self.parts.blocks[-1], base.calls_L[-1]
        capture = Capture(prefix)
        with suppress(Captured):
            block(hidden_BSD, *served(args, capture), **served(kwargs, capture))
        assert capture.found is not None, "a block asks its cache for keys and values"
        known, n_positions = Known(capture.found), hidden_BSD.shape[1]
        args, kwargs = (served(part, known, last_of=n_positions) for part in (args, kwargs))
        return first_of(block(hidden_BSD[:, -1:], *args, **kwargs))

    def read(self, hidden_BSD: Tensor, tokens: TokenBatch, scenarios: int) -> Tensor:
        """The metric [R, N] that the last position of the last block's output gives."""
        last_BD = self.parts.final_norm(hidden_BSD[:, -1:])[:, -1]
        unembedding = self.parts.unembedding
        if self.task.metric == "logit difference" and type(unembedding) is nn.Linear:  # needs the answers' logits only
            ids_V, tokens = _answers_only(tokens)
            ids_V = ids_V.to(last_BD.device)
            bias_V = None if unembedding.bias is None else unembedding.bias[ids_V]
            logits_BV = nn.functional.linear(last_BD, unembedding.weight[ids_V], bias_V)
        else:
            logits_BV = unembedding(last_BD)
        cap = getattr(self.model.hf.config, "final_logit_softcapping", None)
        logits_BV = torch.tanh(logits_BV / cap) * cap if cap else logits_BV
        many = replace(
            tokens, answers_BA=tokens.answers_BA.repeat(scenarios, 1), wrong_BW=tokens.wrong_BW.repeat(scenarios, 1)
        )
        return self._score(logits_BV, many).reshape(scenarios, -1)

    def _score(self, logits_BV: Tensor, tokens: TokenBatch) -> Tensor:
        logits_BV = logits_BV.to("cpu", torch.promote_types(logits_BV.dtype, torch.float32))
        return self.task.score(logits_BV, tokens).double()

    @torch.no_grad()
    def gate_flips(self) -> tuple[int, int]:
        """How many gates differ between plain and restarted forwards of both runs, and of how many.

        0 of 0 for a dense model. In float64 none should flip; in float32 a gate within rounding of zero can.
        """
        counts = [self._flips(group, which) for group in self.groups for which in get_args(WhichRun)]
        return sum(flips for flips, _ in counts), sum(total for _, total in counts)

    def _flips(self, group: Group, which: WhichRun) -> tuple[int, int]:
        """The same of one run of a group, restarted as two copies in one batch."""
        flips = total = 0
        if not self.model.is_sparse:
            return flips, total
        ids_BT = group.tokens.clean_BT if which == "clean" else group.tokens.corrupt_BT
        with tape(self.model.hf, record=("open",)) as plain:
            self.model.hf(input_ids=ids_BT.to(self.model.device), use_cache=False, logits_to_keep=1)
        with tape(self.model.hf, record=("open",)) as restarted:
            self.restart(group, group.run(which), 0, 2, None)
        for layer in range(self.parts.n_layers):
            one = plain["open", layer][:, :, group.start :]
            again = restarted["open", layer]
            flips += int((again != one.repeat(2, 1, 1, 1)).sum())
            total += again.numel()
        return flips, total


def memory_of(device: torch.device) -> int:
    """All memory of a device, in bytes; without limit where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def select(tokens: TokenBatch, indices: Sequence[int]) -> TokenBatch:
    """Some of the pairs of a batch."""
    picked = list(indices)
    return TokenBatch(
        tuple(tokens.rows[index] for index in picked),
        tokens.clean_BT[picked],
        tokens.corrupt_BT[picked],
        tokens.answers_BA[picked],
        tokens.wrong_BW[picked],
    )


def _answers_only(tokens: TokenBatch) -> tuple[Tensor, TokenBatch]:
    """The ids of all answers, and the batch with its answers numbered among them."""
    both = torch.cat([tokens.answers_BA.flatten(), tokens.wrong_BW.flatten()])
    ids_V = both[both >= 0].unique()

    def renumbered(ids_BA: Tensor) -> Tensor:
        return torch.where(ids_BA >= 0, torch.searchsorted(ids_V, ids_BA), -1)

    return ids_V, replace(tokens, answers_BA=renumbered(tokens.answers_BA), wrong_BW=renumbered(tokens.wrong_BW))
