"""Tasks from files of your own: JSON lines with strings (any tokenizer), or CSV in the usual column conventions.

JSON lines, one pair a line; leading spaces count:

    {"clean": "When A and B ... to", "corrupt": "When A and C ... to", "answers": [" A"], "wrong": [" B"]}

CSV: columns `clean` and `corrupted` (or `corrupt`) and one pair of answer columns. Token ids of this tokenizer:
`correct_idx`/`incorrect_idx`, `clean_answer_idx`/`corrupted_answer_idx`, `country_idx`/`corrupted_country_idx`,
`answers_idx`/`corrupted_answers_idx`; strings: `answers`/`wrong` (or `answer`). Several as a list, `[11, 12]`.
A column `label`, or `correct_idx` without its partner, is a start year of two digits: of the years 00 to 99 later ones
are right, the others wrong. For tokenizers that split years into digits the tens digit counts: a larger one is right, a
smaller one wrong, the same one neither. Where a file holds a second corruption, such as `corrupted_hard`, name its
column with `corrupt`.
"""

from __future__ import annotations

import ast
import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError
from gossamer.tasks.forms import Pair
from gossamer.tasks.library import number_digits
from gossamer.tasks.task import Metric, Task, TokenBatch, TokenizedPair, batch_of, encode, single_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ID_COLUMNS = (
    ("correct_idx", "incorrect_idx"),
    ("clean_answer_idx", "corrupted_answer_idx"),
    ("country_idx", "corrupted_country_idx"),
    ("answers_idx", "corrupted_answers_idx"),
)
STRING_COLUMNS = (("answers", "wrong"), ("answer", "wrong"))
YEAR_COLUMNS = ("label", "correct_idx")
CORRUPT_COLUMNS = ("corrupt", "corrupted")
Row = tuple[str, dict[str, Any]]  # where it stands, for complaints, and what it says


def task_from_file(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    n: int | None = None,
    corrupt: str | None = None,
) -> Task:
    """The (first `n`) pairs of a .jsonl or .csv file as a task; the first row of all that will not do is named.

    `corrupt` names the column of the corrupt prompts, where it is not `corrupt` or `corrupted`.
    """
    path = Path(path)
    readers = {".jsonl": _json_rows, ".csv": _csv_rows}
    require_suffix(path, *readers)
    rows = list(readers[path.suffix.lower()](path))
    if not rows:
        raise GossamerError(f"{path} holds no pairs; give at least one row.")
    metric = _metric(rows)
    columns = CORRUPT_COLUMNS if corrupt is None else (corrupt,)
    read = [_pair(where, content, columns, tokenizer) for where, content in rows][:n]
    groups = defaultdict(list)
    for number, (_, tokens) in enumerate(read):
        groups[len(tokens.clean)].append((number, tokens))
    pairs = [pair for pair, _ in read]
    batches: tuple[TokenBatch, ...] = tuple(batch_of(groups[length]) for length in sorted(groups))
    chance = sum(len(pair.answers) / (len(pair.answers) + len(pair.wrong)) for pair in pairs) / len(pairs)
    return Task(name or path.stem, f"pairs of {path.name}", tuple(pairs), batches, "wrong answers", metric, chance, 0)


def require_suffix(path: str | Path, *suffixes: str) -> None:
    """Refuse a file whose name does not end in one of these."""
    found = Path(path).suffix
    if found.lower() not in suffixes:
        raise GossamerError(
            f"This task file must be {' or '.join(suffixes)}, not {found or 'without a suffix'}: {path}."
        )


def _metric(rows: list[Row]) -> Metric:
    """Probabilities where answers are years, logits where they are given; one file, one metric."""
    by_year = [_years(content) is not None for _, content in rows]
    if any(by_year) != all(by_year):
        odd, _ = rows[by_year.index(not by_year[0])]
        first, other = ("a start year", "answers") if by_year[0] else ("answers", "a start year")
        raise GossamerError(f"{odd} gives {other} where the rows before it give {first}; put them into separate files.")
    return "probability difference" if by_year[0] else "logit difference"


def _pair(
    where: str, row: dict[str, Any], corrupt_columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase
) -> tuple[Pair, TokenizedPair]:
    clean, corrupt = _text(where, row, "clean"), _text(where, row, *corrupt_columns)
    ids, corrupt_ids = encode(tokenizer, clean), encode(tokenizer, corrupt)
    if len(ids) != len(corrupt_ids):
        raise GossamerError(
            f"{where}: the clean prompt has {len(ids)} tokens and the corrupt one {len(corrupt_ids)}; patching needs"
            " prompts of equal length."
        )
    answers, wrong = _answers(where, row, clean, ids, tokenizer)
    if not answers or not wrong or set(answers) & set(wrong):
        raise GossamerError(
            f"{where}: the answers must be single tokens after the prompt, at least one right and one wrong, and none"
            " may be both."
        )
    if ids == corrupt_ids:
        raise GossamerError(f"{where}: the clean and the corrupt prompt are the same, so there is nothing to explain.")
    right_words, wrong_words = (tuple(map(tokenizer.decode, side)) for side in (answers, wrong))
    pair = Pair(clean, corrupt, right_words, wrong_words, template=str(row.get("template", "file")))
    return pair, TokenizedPair(ids, corrupt_ids, answers, wrong)


def _json_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise GossamerError(f"{where} is not JSON ({error.msg}); write one object a line.") from None
        if not isinstance(content, dict):
            raise GossamerError(f"{where} is not an object with clean, corrupt, answers and wrong.")
        yield where, content


def _csv_rows(path: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(_text_of(path), newline=""))
    for number in count(1):
        where = f"{path}, row {number}"
        try:
            content = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise GossamerError(f"{where} is not CSV ({error}); check its quotes.") from None
        if None in content or None in content.values():
            raise GossamerError(f"{where} has not as many cells as the header; check its commas and quotes.")
        yield where, dict(content)


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GossamerError(f"{path} could not be read ({error}); give a UTF-8 text file.") from None


def _answers(
    where: str, row: dict[str, Any], clean: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    for right, wrong in ID_COLUMNS:
        if right in row and wrong in row:
            return _ids(where, row[right], right, tokenizer), _ids(where, row[wrong], wrong, tokenizer)
    for right, wrong in STRING_COLUMNS:
        if right in row and wrong in row:
            found, other = (_spelled(where, row, name, clean, ids, tokenizer) for name in (right, wrong))
            return found, other
    column = _years(row)
    if column is not None:
        later, earlier = _later_and_earlier(where, _start_year(where, row[column], column), number_digits(tokenizer))
        return single_tokens(tokenizer, clean, ids, later), single_tokens(tokenizer, clean, ids, earlier)
    known = ", ".join("/".join(columns) for columns in (*STRING_COLUMNS, *ID_COLUMNS))
    raise GossamerError(f"{where} names no answers; give one of these pairs of columns: {known}, or label.")


def _years(row: dict[str, Any]) -> str | None:
    """The column that holds a start year; None where answers are given in full."""
    if any(right in row and wrong in row for right, wrong in (*ID_COLUMNS, *STRING_COLUMNS)):
        return None
    return next((column for column in YEAR_COLUMNS if column in row), None)


def _start_year(where: str, value: Any, column: str) -> int:
    digits = str(value).strip().removesuffix(".0")  # as tables write whole numbers beside gaps
    if not (digits.isdecimal() and int(digits) <= 98):
        raise GossamerError(f"{where}: {column} must be a start year from 00 to 98, not {value!r:.60}.")
    return int(digits)


def _later_and_earlier(where: str, year: int, digits: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How later years and the others end, in as many digits as the tokenizer keeps together."""
    if digits == 2:
        return tuple(f"{y:02d}" for y in range(year + 1, 100)), tuple(f"{y:02d}" for y in range(year + 1))
    tens = year // 10
    if tens in (0, 9):
        raise GossamerError(
            f"{where}: this tokenizer splits years into digits, and after {year:02d} no tens digit is surely"
            f" {'wrong' if tens == 0 else 'right'}; leave the row out, years from 10 to 89 will do."
        )
    return tuple(map(str, range(tens + 1, 10))), tuple(map(str, range(tens)))


def _text(where: str, row: dict[str, Any], *names: str) -> str:
    for name in names:
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    raise GossamerError(f"{where} lacks the text {names[0]!r}; give the clean and the corrupt prompt as strings.")


def _literal(where: str, value: Any, name: str) -> Any:
    """A number or list that may be written as text; nothing is ever executed."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise GossamerError(f"{where}: {name} is {value!r:.60}, which is neither a number nor a list.") from None


def _ids(where: str, value: Any, name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    found = _literal(where, value, name)
    ids = list(found) if isinstance(found, list | tuple) else [found]
    ids = [int(token) if isinstance(token, float) and token.is_integer() else token for token in ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(tokenizer):
            raise GossamerError(
                f"{where}: {name} has {token!r}, which is no token id of this tokenizer ({len(tokenizer):,} tokens)."
            )
    return list(dict.fromkeys(ids))


def _spelled(
    where: str, row: dict[str, Any], name: str, clean: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The token of every string of a column; one that is not a single token after the prompt is named."""
    strings = _strings(where, row[name], name)
    for string in strings:
        if not single_tokens(tokenizer, clean, ids, (string,)):
            raise GossamerError(
                f"{where}: the answers must be single tokens after the prompt, but {name} has {string!r:.60}; leave it"
                " out, or mind the space in front."
            )
    return single_tokens(tokenizer, clean, ids, strings)


def _strings(where: str, value: Any, name: str) -> tuple[str, ...]:
    found = _literal(where, value, name) if isinstance(value, str) and value.lstrip().startswith("[") else value
    strings = tuple(found) if isinstance(found, list | tuple) else (found,)
    if not all(isinstance(string, str) and string for string in strings):
        raise GossamerError(f"{where}: {name} must be a string or a list of strings, not {value!r:.60}.")
    return strings
