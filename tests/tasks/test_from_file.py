from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

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
    for name, sentence in (sentences | {"d.csv": "no pairs", "e.txt": "is .jsonl or .csv", "f.csv": "read"}).items():
        with pytest.raises(GossamerError, match=sentence):
            task_from_file(tmp_path / name, TOKENIZER)
