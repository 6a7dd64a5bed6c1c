import json

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer import corpus
from gossamer.corpus import tokenizer
from gossamer.corpus.sequences import Sequences, pack
from gossamer.errors import GossamerError

BOS = 0


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load()


def test_packing_keeps_every_token_in_order_and_marks_documents():
    documents = [[1, 2, 3], [4] * 10, [5, 6], [7] * 7]
    packed = pack(documents, 6, bos=BOS)
    assert packed.segments_NT is not None
    text = [token for token in packed.ids_NT.flatten() if token != BOS]
    assert text == [token for document in documents for token in document][: len(text)]
    for ids, segments in zip(packed.ids_NT, packed.segments_NT, strict=True):
        starts = np.flatnonzero(np.diff(segments, prepend=-1))
        assert (ids[starts] == BOS).all()
        assert (ids == BOS).sum() == len(starts)


def test_one_long_document_has_no_segments():
    packed = pack([list(range(1, 100))], 10, bos=None)
    assert packed.segments_NT is None
    assert (packed.ids_NT.flatten() == np.arange(1, 91)).all()


def test_a_limit_stops_reading():
    def endless():
        while True:
            yield [1, 2, 3]

    assert len(pack(endless(), 8, bos=BOS, limit=5)) == 5


def test_targets_skip_document_boundaries():
    sequences = Sequences(np.array([[0, 1, 2, 0, 3]]), np.array([[0, 0, 0, 1, 1]]))
    assert sequences.targets().tolist() == [[1, 2, -100, 3, -100]]


def test_sequences_survive_the_disk(tmp_path):
    sequences = Sequences(np.arange(12).reshape(3, 4), np.zeros((3, 4), dtype=int))
    sequences.save(tmp_path / "text.safetensors")
    loaded = Sequences.load(tmp_path / "text.safetensors")
    assert loaded.fingerprint() == sequences.fingerprint()
    assert loaded.fingerprint() != Sequences(np.arange(12).reshape(3, 4) + 1).fingerprint()


def test_files_folders_and_json_lines_hold_the_same_documents(tmp_path, tok):
    documents = [f"{name} has a red box. " * 20 for name in ("Mary", "John", "Anna")]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(documents):
        (folder / f"{number}.txt").write_text(text)
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    from_folder = corpus.from_text(folder, tok, length=32)
    from_lines = corpus.from_text(lines, tok, length=32)
    assert from_folder.fingerprint() == from_lines.fingerprint()


def test_a_saved_dataset_reads_like_the_text(tmp_path, tok):
    datasets = pytest.importorskip("datasets")
    documents = ["Mary has a red box. " * 20, "John has a blue cup. " * 20]
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(tmp_path / "saved")
    packed = corpus.from_dataset(str(tmp_path / "saved"), tok, length=32, limit=4)
    assert packed.fingerprint() == corpus.tokenize(documents, tok, length=32, limit=4).fingerprint()
    with pytest.raises(GossamerError, match="no field 'body'"):
        corpus.from_dataset(str(tmp_path / "saved"), tok, length=32, limit=4, field="body")


def test_text_sampled_from_the_model_follows_the_model(tok):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=16, n_embd=12, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(20, 12))
        model.lm_head.weight[7] = 50 * model.transformer.ln_f(model.transformer.wte.weight[0])
    first, again, other = (corpus.from_model(model, tok, length=16, n=6, seed=seed, batch=4) for seed in (1, 1, 2))
    assert first.ids_NT.shape == (6, 16)
    assert (first.ids_NT[:, 0] == tok.bos_token_id).all()
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert (first.ids_NT == 7).mean() > 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty or shorter"), ("Mary has", "empty or shorter"), (b"\xff\xfe\x00", "not readable UTF-8")],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, tok, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(GossamerError, match=message):
        corpus.from_text(path, tok, length=32)


def test_missing_text_and_bad_lines_are_named(tmp_path, tok):
    with pytest.raises(GossamerError, match="There is no text at"):
        corpus.from_text(tmp_path / "nowhere.txt", tok, length=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(GossamerError, match="holds no text files"):
        corpus.from_text(tmp_path / "empty", tok, length=8)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(GossamerError, match="Line 2"):
        corpus.from_text(tmp_path / "bad.jsonl", tok, length=8)


def test_a_name_that_is_nowhere_is_refused_after_one_question(tok, monkeypatch):
    pytest.importorskip("datasets")
    asked = []

    def unknown(_, name, *, timeout):
        asked.append((name, timeout))
        raise OSError("no such dataset")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unknown)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked again and again"))
    with pytest.raises(GossamerError, match=r"'selff' is no text file .*Did you mean 'self'"):
        corpus.from_dataset("selff", tok, length=8, limit=4)
    assert asked == [("selff", 5.0)]
