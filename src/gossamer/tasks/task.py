"""A task: clean and corrupt prompts of equal length for the tokenizer at hand, with answers that are one token."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from gossamer.errors import GossamerError
from gossamer.tasks.forms import Pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Criterion = Literal["any other token", "wrong answers"]
Metric = Literal["logit difference", "probability difference"]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, behind the tokenizer's BOS token if it has one."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None else [bos, *ids]


@dataclass(frozen=True)
class TokenBatch:
    """Pairs of one length: the rows' numbers in the task, ids, and answers padded with -1."""

    rows: tuple[int, ...]
    clean_BT: torch.Tensor
    corrupt_BT: torch.Tensor
    answers_BA: torch.Tensor
    wrong_BW: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Task:
    """Pairs of prompts with everything needed to score a model on them."""

    name: str
    description: str
    pairs: tuple[Pair, ...]
    tokens: tuple[TokenBatch, ...]
    criterion: Criterion
    metric: Metric
    chance: float
    seed: int

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts, their answers and their order: what scores of single prompts belong to."""
        digest = hashlib.blake2b(digest_size=8)
        for batch in self.tokens:
            ids = (batch.clean_BT, batch.corrupt_BT, batch.answers_BA, batch.wrong_BW)
            digest.update(repr((batch.rows, *(part.tolist() for part in ids))).encode())
        return digest.hexdigest()

    @staticmethod
    def from_jsonl(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, name: str | None = None) -> Task:
        """Pairs of a JSON-lines file as a task; see `tasks.from_file` for the form of a line."""
        from gossamer.tasks.from_file import require_suffix, task_from_file

        require_suffix(path, ".jsonl")
        return task_from_file(path, tokenizer, name=name)

    @staticmethod
    def from_csv(
        path: str | Path, tokenizer: PreTrainedTokenizerBase, *, name: str | None = None, corrupt: str | None = None
    ) -> Task:
        """Pairs of a CSV file as a task; see `tasks.from_file` for the columns."""
        from gossamer.tasks.from_file import require_suffix, task_from_file

        require_suffix(path, ".csv")
        return task_from_file(path, tokenizer, name=name, corrupt=corrupt)

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """The pairs in batches of one length and at most `size` rows."""
        for group in self.tokens:
            for start in range(0, len(group), size):
                part = slice(start, start + size)
                yield TokenBatch(
                    group.rows[part],
                    group.clean_BT[part],
                    group.corrupt_BT[part],
                    group.answers_BA[part],
                    group.wrong_BW[part],
                )

    def score(self, logits_BV: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """The task's metric [B] of next-token logits; large when the clean prompt's answer is preferred."""
        values = logits_BV.softmax(-1) if self.metric == "probability difference" else logits_BV
        total = self.metric == "probability difference"
        return _pooled(values, batch.answers_BA, total=total) - _pooled(values, batch.wrong_BW, total=total)

    def correct(self, logits_BV: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Whether [B] the best right answer beats every wrong one (by the task's criterion)."""
        right_B = _best(logits_BV, batch.answers_BA)
        if self.criterion == "any other token":
            return right_B == logits_BV.amax(-1)
        return right_B > _best(logits_BV, batch.wrong_BW)


def _pooled(values_BV: torch.Tensor, ids_BA: torch.Tensor, *, total: bool) -> torch.Tensor:
    known_BA = ids_BA >= 0
    chosen_BA = values_BV.gather(1, ids_BA.clamp(min=0)) * known_BA
    return chosen_BA.sum(1) if total else chosen_BA.sum(1) / known_BA.sum(1)


def _best(values_BV: torch.Tensor, ids_BA: torch.Tensor) -> torch.Tensor:
    return values_BV.gather(1, ids_BA.clamp(min=0)).masked_fill(ids_BA < 0, -torch.inf).amax(1)


@dataclass(frozen=True)
class TokenizedPair:
    """A pair as token ids; answers are single tokens."""

    clean: list[int]
    corrupt: list[int]
    answers: list[int]
    wrong: list[int]


def single_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int], endings: tuple[str, ...]
) -> list[int]:
    """The token of each ending that adds exactly one token to the prompt and leaves the prompt's own unchanged."""
    found = []
    for ending in endings:
        longer = encode(tokenizer, prompt + ending)
        if len(longer) == len(ids) + 1 and longer[:-1] == ids:
            found.append(longer[-1])
    return list(dict.fromkeys(found))


def _tokenized(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> TokenizedPair | str:
    """The pair as ids, or the reason why this tokenizer cannot express it."""
    clean, corrupt = encode(tokenizer, pair.clean), encode(tokenizer, pair.corrupt)
    if len(clean) != len(corrupt):
        return f"the clean prompt has {len(clean)} tokens and the corrupt one {len(corrupt)}"
    answers = single_tokens(tokenizer, pair.clean, clean, pair.answers)
    wrong = [token for token in single_tokens(tokenizer, pair.clean, clean, pair.wrong) if token not in answers]
    if not answers or not wrong:
        return f"the answers {pair.answers[:3]} or {pair.wrong[:3]} are not single tokens after the prompt"
    return TokenizedPair(clean, corrupt, answers, wrong)


def _padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, proposals: Iterator[Pair], n: int, *, task: str
) -> tuple[tuple[Pair, ...], tuple[TokenBatch, ...]]:
    """The first `n` different pairs this tokenizer can express, and their tokens grouped by length."""
    kept: dict[str, Pair] = {}
    groups: dict[int, list[tuple[int, TokenizedPair]]] = defaultdict(list)
    reason = "no pair was proposed"
    for attempt, pair in enumerate(proposals):
        if len(kept) == n:
            break
        if attempt > 50 * n + 500:
            raise GossamerError(
                f"Only {len(kept)} of {n} different {task} prompts fit this tokenizer (last reason: {reason}); "
                "ask for fewer prompts or leave the task out."
            )
        if pair.clean in kept:
            reason = "the prompts repeat"
            continue
        tokens = _tokenized(tokenizer, pair)
        if isinstance(tokens, str):
            reason = tokens
            continue
        groups[len(tokens.clean)].append((len(kept), tokens))
        kept[pair.clean] = pair
    return tuple(kept.values()), tuple(batch_of(groups[length]) for length in sorted(groups))


def batch_of(rows: list[tuple[int, TokenizedPair]]) -> TokenBatch:
    """Numbered pairs of one length as tensors."""
    return TokenBatch(
        rows=tuple(row for row, _ in rows),
        clean_BT=torch.tensor([pair.clean for _, pair in rows]),
        corrupt_BT=torch.tensor([pair.corrupt for _, pair in rows]),
        answers_BA=_padded([pair.answers for _, pair in rows]),
        wrong_BW=_padded([pair.wrong for _, pair in rows]),
    )
