from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gossamer import GossamerError
from gossamer.corpus import tokenizer as own_tokenizer
from gossamer.tasks import Task, get, task_from_file

TOKENIZER = own_tokenizer.load()
PAIRS = get("ioi", TOKENIZER, 4).pairs


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def rows() -> list[dict[str, object]]:
    return [{"clean": p.clean, "corrupt": p.corrupt, "answers": list(p.answers), "wrong": list(p.wrong)} for p in PAIRS]


def test_json_lines_give_the_same_tokens_as_the_library(tmp_path: Path) -> None:
    task, built_in = Task.from_jsonl(jsonl(tmp_path / "mine.jsonl", rows()), TOKENIZER), get("ioi", TOKENIZER, 4)
    assert (task.name, len(task), task.chance) == ("mine", 4, 0.5)
    for one, other in zip(task.tokens, built_in.tokens, strict=True):
        assert one.rows == other.rows
        for part in ("clean_BT", "corrupt_BT", "answers_BA", "wrong_BW"):
            assert getattr(one, part).tolist() == getattr(other, part).tolist()


def test_csv_with_token_ids(tmp_path: Path) -> None:
    built_in = get("ioi", TOKENIZER, 4)
    ids = {row: pair for group in built_in.tokens for row, pair in zip(group.rows, group.answers_BA, strict=True)}
    wrong = {row: pair for group in built_in.tokens for row, pair in zip(group.rows, group.wrong_BW, strict=True)}
    lines = ["clean,corrupted,corrupted_hard,correct_idx,incorrect_idx"]
    for row, pair in enumerate(PAIRS):
        lines.append(f'"{pair.clean}","{pair.corrupt}","x",{int(ids[row])},"[{int(wrong[row])}, 3]"')
    (tmp_path / "ioi.csv").write_text("\n".join(lines), encoding="utf-8")
    task = Task.from_csv(tmp_path / "ioi.csv", TOKENIZER)
    assert task.tokens[0].answers_BA.tolist() == built_in.tokens[0].answers_BA.tolist()
    assert task.tokens[0].wrong_BW.shape[1] == 2
    assert len(task_from_file(tmp_path / "ioi.csv", TOKENIZER, n=2)) == 2


@pytest.mark.parametrize("column", ["label", "correct_idx"])
@pytest.mark.parametrize(("year", "later"), [("41", 58), ("04", 95)])
def test_years(column: str, year: str, later: int, tmp_path: Path) -> None:
    pair = get("greater-than", TOKENIZER, 1).pairs[0]
    row = f'"{pair.clean}","{pair.corrupt}",{year}'
    (tmp_path / "y.csv").write_text(f"clean,corrupted,{column}\n{row}\n", encoding="utf-8")
    task = task_from_file(tmp_path / "y.csv", TOKENIZER)
    assert task.metric == "probability difference"
    assert int(task.pairs[0].answers[0]) == int(year) + 1
    assert len(task.pairs[0].answers) == later


@pytest.mark.parametrize("label", [0, 1, "00", "41.0", 41.0, 98])
def test_years_are_scored_over_all_hundred(label: object, tmp_path: Path) -> None:
    """The common metric: probability of all later years minus that of all others, from 00 on."""
    pair = get("greater-than", TOKENIZER, 1).pairs[0]
    start = int(float(str(label)))
    content = {"clean": pair.clean, "corrupt": pair.corrupt, "label": label}
    task = task_from_file(jsonl(tmp_path / "y.jsonl", [content]), TOKENIZER)
    probability_V = torch.rand(1, len(TOKENIZER))
    ids = [TOKENIZER(pair.clean + f"{year:02d}", add_special_tokens=False)["input_ids"][-1] for year in range(100)]
    assert len(set(ids)) == 100
    by_year = probability_V.softmax(-1)[0, ids]
    expected = by_year[start + 1 :].sum() - by_year[: start + 1].sum()
    torch.testing.assert_close(task.score(probability_V, task.tokens[0])[0], expected)


class Digits:
    """A tokenizer of single characters, as SmolLM2's is for numbers."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def decode(self, token: int) -> str:
        return chr(token)

    def __len__(self) -> int:
        return 256


def test_years_where_numbers_are_split_into_digits(tmp_path: Path) -> None:
    """The tens digit decides, as in the built-in task; where it cannot, the row is named."""
    content = {"clean": "from 1741 to 17", "corrupt": "from 1701 to 17", "label": "41"}
    task = task_from_file(jsonl(tmp_path / "y.jsonl", [content]), Digits())  # type: ignore[arg-type]
    assert task.pairs[0].answers == ("5", "6", "7", "8", "9")
    assert task.pairs[0].wrong == ("0", "1", "2", "3")
    for label, side in ((7, "wrong"), (93, "right")):
        with pytest.raises(GossamerError, match=rf"line 1: .* no tens digit is surely {side}; leave the row out"):
            task_from_file(jsonl(tmp_path / "y.jsonl", [content | {"label": label}]), Digits())  # type: ignore[arg-type]


def test_whole_numbers_may_be_written_with_a_point(tmp_path: Path) -> None:
    """As tables write a column of ids that has gaps."""
    pair = PAIRS[0]
    lines = f'clean,corrupted,correct_idx,incorrect_idx\n"{pair.clean}","{pair.corrupt}",292.0,"[3.0, 7]"\n'
    (tmp_path / "ids.csv").write_text(lines, encoding="utf-8")
    task = Task.from_csv(tmp_path / "ids.csv", TOKENIZER)
    assert task.tokens[0].answers_BA.tolist() == [[292]]
    assert task.tokens[0].wrong_BW.tolist() == [[3, 7]]
    (tmp_path / "ids.csv").write_text(lines.replace("292.0", "292.5"), encoding="utf-8")
    with pytest.raises(GossamerError, match=r"row 1: correct_idx has 292\.5"):
        Task.from_csv(tmp_path / "ids.csv", TOKENIZER)


def test_a_file_of_years_and_answers_is_refused(tmp_path: Path) -> None:
    """They have different metrics: the first row cannot speak for the others."""
    years = {"clean": PAIRS[1].clean, "corrupt": PAIRS[1].corrupt, "label": 41}
    with pytest.raises(GossamerError, match="line 2 gives a start year where the rows before it give answers"):
        task_from_file(jsonl(tmp_path / "mixed.jsonl", [rows()[0], years]), TOKENIZER)
    with pytest.raises(GossamerError, match="line 2 gives answers where the rows before it give a start year"):
        task_from_file(jsonl(tmp_path / "mixed.jsonl", [years, rows()[0]]), TOKENIZER)


def test_a_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    for read, name in ((Task.from_jsonl, "a.csv"), (Task.from_csv, "a.jsonl")):
        (tmp_path / name).write_text("", encoding="utf-8")
        with pytest.raises(GossamerError, match=r"must be \.(jsonl|csv), not \.(csv|jsonl)"):
            read(tmp_path / name, TOKENIZER)  # type: ignore[operator]


def test_a_fingerprint_is_of_prompts_and_answers() -> None:
    ioi = get("ioi", TOKENIZER, 4)
    same, renamed = get("ioi", TOKENIZER, 4), replace(ioi, name="other")
    assert ioi.fingerprint == same.fingerprint == renamed.fingerprint
    others = (get("ioi", TOKENIZER, 3), get("ioi-flip", TOKENIZER, 4), get("ioi", TOKENIZER, 4, seed=1))
    assert len({ioi.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_the_other_corruption_of_a_file(tmp_path: Path) -> None:
    """As the common IOI files have it: a second corruption in a column of its own, an index without a name."""
    third, flip = (get(name, TOKENIZER, 3) for name in ("ioi", "ioi-flip"))
    assert [pair.clean for pair in third.pairs] == [pair.clean for pair in flip.pairs]
    lines = [",clean,corrupted,corrupted_hard,correct_idx,incorrect_idx"]
    for row, (easy, hard) in enumerate(zip(third.pairs, flip.pairs, strict=True)):
        ids = (TOKENIZER.convert_tokens_to_ids(TOKENIZER.tokenize(side[0])[0]) for side in (easy.answers, easy.wrong))
        lines.append(f'{470 + row},"{easy.clean}","{easy.corrupt}","{hard.corrupt}",' + ",".join(map(str, ids)))
    (tmp_path / "ioi.csv").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    for built_in, column in ((third, None), (flip, "corrupted_hard")):
        task = Task.from_csv(tmp_path / "ioi.csv", TOKENIZER, corrupt=column)
        for one, other in zip(task.tokens, built_in.tokens, strict=True):
            assert one.corrupt_BT.tolist() == other.corrupt_BT.tolist()
            assert one.answers_BA.tolist() == other.answers_BA.tolist()
    with pytest.raises(GossamerError, match="row 1 lacks the text 'corrupted_soft'"):
        Task.from_csv(tmp_path / "ioi.csv", TOKENIZER, corrupt="corrupted_soft")


def test_prompts_of_several_lines(tmp_path: Path) -> None:
    (pair,) = get("docstring", TOKENIZER, 1).pairs
    assert "\n" in pair.clean
    with (tmp_path / "doc.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["clean", "corrupt", "answer", "wrong"])
        writer.writerow([pair.clean, pair.corrupt, pair.answers[0], pair.wrong[0]])
    task = task_from_file(tmp_path / "doc.csv", TOKENIZER)
    assert (task.pairs[0].clean, task.pairs[0].corrupt) == (pair.clean, pair.corrupt)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"corrupt": "When"}, r"line 2: the clean prompt has \d+ tokens and the corrupt one 2"),
        ({"answers": [" nowhere-to-be-found"]}, "line 2: the answers must be single tokens"),
        ({"answers": [" Anna", " nowhere-to-be-found"]}, "but answers has ' nowhere-to-be-found'"),
        ({"corrupt": PAIRS[1].clean}, "line 2: the clean and the corrupt prompt are the same"),
        ({"wrong": 3.5}, "line 2: wrong must be a string"),
        ({"clean": None}, "line 2 lacks the text 'clean'"),
        ({"correct_idx": 10**9, "incorrect_idx": 1}, "line 2: correct_idx has 1000000000"),
        ({"answers": None, "wrong": None, "label": "17th"}, "line 2: answers must be a string"),
        ({"correct_idx": "__import__('os')", "incorrect_idx": 1}, "neither a number nor a list"),
    ],
)
def test_a_bad_row_is_named(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    bad = rows()
    bad[1] |= change
    with pytest.raises(GossamerError, match=sentence):
        task_from_file(jsonl(tmp_path / "bad.jsonl", bad), TOKENIZER)  # type: ignore[arg-type]


def test_rows_behind_those_taken_are_read_too(tmp_path: Path) -> None:
    bad = rows()
    bad[3] |= {"corrupt": "When"}
    with pytest.raises(GossamerError, match="line 4"):
        task_from_file(jsonl(tmp_path / "bad.jsonl", bad), TOKENIZER, n=2)  # type: ignore[arg-type]


def test_a_cell_too_large_for_csv_is_named(tmp_path: Path) -> None:
    (tmp_path / "large.csv").write_text(f"clean,corrupted\nx,{'y' * 200_000}\n", encoding="utf-8")
    with pytest.raises(GossamerError, match="row 1 is not CSV"):
        task_from_file(tmp_path / "large.csv", TOKENIZER)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"clean": 1', encoding="utf-8")
    (tmp_path / "b.csv").write_text("clean,corrupted,correct_idx,incorrect_idx\nx,y\n", encoding="utf-8")
    (tmp_path / "c.csv").write_text("clean,corrupted\nWhen,When\n", encoding="utf-8")
    (tmp_path / "d.csv").write_text("", encoding="utf-8")
    sentences = {"a.jsonl": "line 1 is not JSON", "b.csv": "row 1 has not as many", "c.csv": "row 1 names no answers"}
    for name, sentence in (
        sentences | {"d.csv": "no pairs", "e.txt": "must be .jsonl or .csv", "f.csv": "read"}
    ).items():
        with pytest.raises(GossamerError, match=sentence):
            task_from_file(tmp_path / name, TOKENIZER)
