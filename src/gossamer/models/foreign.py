"""GPT-2 weights that others saved: the layout is read off the keys, the import proves itself on text.

    nanogpt          transformer.h.0.attn.c_attn.weight [3D, D], projections as torch keeps them; maybe `_orig_mod.`
    transformers     transformer.h.0.attn.c_attn.weight [D, 3D], projections transposed
    transformerlens  blocks.0.attn.W_Q [H, D, E], one matrix a head

A state dict does not say everything: the activation, a gate and (except in TransformerLens' layout) the number of heads
are looked for in the checkpoint's own `model_args` and in a config.json beside the file, and `ForeignOptions` overrules
both. Where nobody says how many heads there are the file is refused: a wrong number loads without a complaint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerBase

from gossamer.attention import ForceOpen, GateConfig, tape
from gossamer.errors import GossamerError
from gossamer.files import read_json
from gossamer.models.checkpoint import finish, read_tokenizer, resolve_dtype
from gossamer.models.loaded import LoadedModel, gate
from gossamer.models.weights import build_model, quiet_transformers, read_state

GPT2_VOCABULARY = 50257
PADDED_VOCABULARY = 50304  # GPT-2's, rounded up to a multiple of 64; the rows above are never used
ENGLISH = (  # what an import is proved on if nothing else is given
    "The old house stood at the end of the road, and nobody had lived in it for many years. When the children "
    "came home from school they used to walk past it as quickly as they could, because the youngest of them "
    "was sure that she had once seen a light in one of the windows. Her brother said that it was only the sun, "
    "and that there was nothing to be afraid of. But in the evening, when the wind was in the trees and the "
    "rain was on the roof, he was not so sure of it any more, and he was glad that the door was closed and "
    "that his mother was in the next room.\n"
)
_NESTED = ("model", "state_dict", "model_state_dict", "module")
_PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)+")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.mask", ".attn.IGNORE")
_LENS_INPUTS = re.compile(r"\.attn\.W_[QKV]$")
_PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

State = dict[str, Tensor]


@dataclass(frozen=True)
class ForeignOptions:
    """What a state dict leaves open; None means: as its checkpoint or the config.json beside it says.

    `n_heads`: how many heads a layer has; needed if the file does not say. `vocabulary`: rows to keep, else GPT-2's.
    `activation`: "gelu" (exact; nanoGPT) or "gelu_new" (its approximation; OpenAI's GPT-2). `gate_offset`: the one
    fixed scalar b of a published sparse checkpoint. `prove_on`: text that the import must predict, or be refused.
    """

    n_heads: int | None = None
    activation: str | None = None
    vocabulary: int | None = None
    gate_offset: float | None = None
    prove_on: str | None = None


def load_foreign(
    path: str | Path,
    options: ForeignOptions | None = None,
    *,
    name: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a GPT-2 state dict in any of the three layouts."""
    path, options = Path(path), options or ForeignOptions()
    checkpoint = read_state(path)
    said = _side_information(checkpoint, path)
    state = _tensors_of(checkpoint)
    layout = sniff(state, path)
    n_heads = _n_heads(path, _heads_in_weights(state), said, options)
    state = _LAYOUTS[layout](state)
    _cut_vocabulary(state, options.vocabulary)
    config = _config(state, said, options, layout, n_heads)
    hf = build_model(config, _with_missing_biases(state, config), resolve_dtype(dtype, device))
    tokenizer = tokenizer or read_tokenizer(path.parent) or _cached_gpt2_tokenizer(config.vocab_size)
    model = finish(hf, name=name or str(path), source=str(path), layout=layout, tokenizer=tokenizer, device=device)
    offset = _gate_offset(options, said)
    if offset is not None:
        gate(model, GateConfig("logit", offset))
    if options.prove_on is not None:
        prove_import(model, options.prove_on).require()
    return model


def sniff(state: Mapping[str, Tensor], path: str | Path = "The state dict") -> str:
    """The layout of a GPT-2 state dict: `nanogpt`, `transformers` or `transformerlens`."""
    if "embed.W_E" in state:
        return "transformerlens"
    first = state.get("transformer.h.0.attn.c_attn.weight", state.get("h.0.attn.c_attn.weight"))
    if first is not None and first.ndim == 2:
        if first.shape[0] == 3 * first.shape[1]:
            return "nanogpt"
        if first.shape[1] == 3 * first.shape[0]:
            return "transformers"
    shown = ", ".join(sorted(state)[:3]) or "no tensors"
    raise GossamerError(
        f"{path} is in no layout that gossamer knows ({shown}); it reads GPT-2 state dicts of nanoGPT, transformers "
        "and TransformerLens, and other models as folders."
    )


def _side_information(checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    said: dict[str, Any] = {}
    beside = path.parent / "config.json"
    if beside.is_file():
        loaded = read_json(beside)
        said |= loaded if isinstance(loaded, dict) else {}
    for key in ("config", "model_args"):
        inside = checkpoint.get(key)
        said |= dict(inside) if isinstance(inside, Mapping) else {}
    return said


def _tensors_of(checkpoint: Mapping[str, Any]) -> State:
    for key in _NESTED:
        inside = checkpoint.get(key)
        if isinstance(inside, Mapping):
            return _tensors_of(inside)
    state = {_PREFIX.sub("", name): value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    return {name: value for name, value in state.items() if not name.endswith(_BUFFERS)}


def _from_transformers(state: State) -> State:
    return {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": w for name, w in state.items()
    }


def _from_nanogpt(state: State) -> State:
    transposed = tuple(f"{projection}.weight" for projection in _PROJECTIONS)
    return {
        name: weight.T.contiguous() if name.endswith(transposed) else weight
        for name, weight in _from_transformers(state).items()
    }


def _from_transformerlens(state: State) -> State:
    left = dict(state)
    n_layers = _count_layers(left, r"blocks\.(\d+)\.")
    converted = {
        "transformer.wte.weight": _take(left, "embed.W_E"),
        "transformer.wpe.weight": _take(left, "pos_embed.W_pos"),
    }
    for layer in range(n_layers):
        converted |= _lens_block(left, f"blocks.{layer}", f"transformer.h.{layer}")
    width = converted["transformer.wte.weight"].shape[1]
    converted |= _lens_norm(left, "ln_final", "transformer.ln_f", width)
    converted["lm_head.weight"] = _take(left, "unembed.W_U").T.contiguous()
    bias_V = left.pop("unembed.b_U", torch.zeros(1))
    if not torch.allclose(bias_V, bias_V[:1].expand_as(bias_V)):
        raise GossamerError(
            "The TransformerLens weights have an unembedding bias (their final norm was folded in), which GPT-2 has no "
            "place for; save the model without fold_ln."
        )
    if left:
        raise GossamerError(f"The TransformerLens weights hold {sorted(left)[0]!r}, which a GPT-2 does not have.")
    return converted


def _lens_block(left: State, lens: str, ours: str) -> State:
    inputs = [_take(left, f"{lens}.attn.W_{part}") for part in "QKV"]
    n_heads, width, head_width = inputs[0].shape
    flat = [weight_HDE.permute(1, 0, 2).reshape(width, n_heads * head_width) for weight_HDE in inputs]
    biases = [left.pop(f"{lens}.attn.b_{part}", torch.zeros(n_heads, head_width)).flatten() for part in "QKV"]
    block = {
        f"{ours}.attn.c_attn.weight": torch.cat(flat, dim=1),
        f"{ours}.attn.c_attn.bias": torch.cat(biases),
        f"{ours}.attn.c_proj.weight": _take(left, f"{lens}.attn.W_O").flatten(0, 1),
        f"{ours}.mlp.c_fc.weight": _take(left, f"{lens}.mlp.W_in"),
        f"{ours}.mlp.c_proj.weight": _take(left, f"{lens}.mlp.W_out"),
    }
    for theirs, name in (("attn.b_O", "attn.c_proj"), ("mlp.b_in", "mlp.c_fc"), ("mlp.b_out", "mlp.c_proj")):
        if f"{lens}.{theirs}" in left:
            block[f"{ours}.{name}.bias"] = left.pop(f"{lens}.{theirs}")
    return (
        block
        | _lens_norm(left, f"{lens}.ln1", f"{ours}.ln_1", width)
        | _lens_norm(left, f"{lens}.ln2", f"{ours}.ln_2", width)
    )


def _lens_norm(left: State, lens: str, ours: str, width: int) -> State:
    """A norm's weight and bias; TransformerLens leaves both out once they are folded into what follows."""
    weight, bias = left.pop(f"{lens}.w", None), left.pop(f"{lens}.b", None)
    return {
        f"{ours}.weight": torch.ones(width) if weight is None else weight,
        f"{ours}.bias": torch.zeros(width) if bias is None else bias,
    }


_LAYOUTS: dict[str, Callable[[State], State]] = {
    "nanogpt": _from_nanogpt,
    "transformers": _from_transformers,
    "transformerlens": _from_transformerlens,
}


def _take(state: State, name: str) -> Tensor:
    weight = _required(state, name)
    del state[name]
    return weight


def _required(state: State, name: str) -> Tensor:
    if name not in state:
        raise GossamerError(f"The weights lack {name!r}, so they are not a whole GPT-2; save the complete state dict.")
    return state[name]


def _count_layers(state: Mapping[str, Any], pattern: str) -> int:
    found = {int(match.group(1)) for name in state if (match := re.match(pattern, name))}
    if found != set(range(len(found))) or not found:
        raise GossamerError(f"The weights have layers {sorted(found)}, with gaps; save the complete state dict.")
    return len(found)


def _cut_vocabulary(state: State, wanted: int | None) -> None:
    """Drop the padding rows above the vocabulary, in place; tied weights stay one tensor."""
    rows = state["transformer.wte.weight"].shape[0] if "transformer.wte.weight" in state else 0
    keep = wanted or (GPT2_VOCABULARY if rows == PADDED_VOCABULARY else rows)
    if keep > rows:
        raise GossamerError(f"A vocabulary of {keep} was asked for but the weights have {rows} rows; ask for fewer.")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in state:
            state[name] = state[name][:keep].clone()


def _config(state: State, said: Mapping[str, Any], options: ForeignOptions, layout: str, n_heads: int) -> GPT2Config:
    embedding_VD = _required(state, "transformer.wte.weight")
    vocabulary, width = embedding_VD.shape
    if width % n_heads:
        raise GossamerError(f"{n_heads} heads do not divide the width {width} of these weights; give their own number.")
    unembedding_VD = state.get("lm_head.weight")
    marker = GPT2_VOCABULARY - 1 if vocabulary == GPT2_VOCABULARY else None
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=_required(state, "transformer.wpe.weight").shape[0],
        n_embd=width,
        n_layer=_count_layers(state, r"transformer\.h\.(\d+)\."),
        n_head=n_heads,
        n_inner=_required(state, "transformer.h.0.mlp.c_fc.weight").shape[1],
        activation_function=_activation(said, options, layout),
        tie_word_embeddings=unembedding_VD is None or torch.equal(unembedding_VD, embedding_VD),
        bos_token_id=marker,
        eos_token_id=marker,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def _heads_in_weights(state: State) -> int | None:
    """How many heads the weights themselves have, where the layout keeps one matrix a head."""
    found = {weight_HDE.shape[0] for name, weight_HDE in state.items() if _LENS_INPUTS.search(name)}
    if len(found) > 1:
        raise GossamerError(f"The layers have {sorted(found)} heads, and a GPT-2 has the same number in every layer.")
    return found.pop() if found else None


def _n_heads(path: Path, in_weights: int | None, said: Mapping[str, Any], options: ForeignOptions) -> int:
    stated = options.n_heads or said.get("n_head") or said.get("n_heads")
    if stated is None and in_weights is None:
        raise GossamerError(
            f"Nothing says how many heads {path} has, and a wrong number would load as another model: convert it with "
            f"`gossamer models {path} --heads N --save FOLDER`, or give foreign=ForeignOptions(n_heads=N)."
        )
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or stated < 1):
        raise GossamerError(f"The number of heads is a whole number of at least 1, not {stated!r}.")
    if None not in (stated, in_weights) and stated != in_weights:
        raise GossamerError(
            f"The weights in {path} have {in_weights} heads, but {stated} are asked for (by the options or a "
            "config.json beside the file); leave the number out, or give the weights that belong to it."
        )
    return int(stated or in_weights or 0)


def _activation(said: Mapping[str, Any], options: ForeignOptions, layout: str) -> str:
    default = "gelu" if layout == "nanogpt" else "gelu_new"
    return str(options.activation or said.get("activation_function") or said.get("act_fn") or default)


def _with_missing_biases(state: State, config: GPT2Config) -> State:
    """Zeros for the biases of a model trained without them; one that only some layers lack stays missing."""
    width, inner = config.n_embd, config.n_inner
    sizes = {"ln_1": width, "ln_2": width, "attn.c_attn": 3 * width, "attn.c_proj": width}
    sizes |= {"mlp.c_fc": inner, "mlp.c_proj": width}
    like = state["transformer.wte.weight"]
    biases = {"transformer.ln_f.bias": like.new_zeros(width)}
    for part, size in sizes.items():
        names = [f"transformer.h.{layer}.{part}.bias" for layer in range(config.n_layer)]
        if state.keys().isdisjoint(names):
            biases |= {name: like.new_zeros(size) for name in names}
    complete = biases | state
    if config.tie_word_embeddings:
        complete.pop("lm_head.weight", None)
    return complete


def _gate_offset(options: ForeignOptions, said: Mapping[str, Any]) -> float | None:
    if options.gate_offset is not None:
        return float(options.gate_offset)
    return float(said.get("bias_gate") or 0.0) if said.get("use_sparse_attn") else None


def _cached_gpt2_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase | None:
    """GPT-2's own tokenizer, if the vocabulary is GPT-2's and the tokenizer was downloaded before."""
    if vocabulary != GPT2_VOCABULARY:
        return None
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained("gpt2", local_files_only=True)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class ImportProof:
    """Losses, in nats a token, that an imported model reaches on text: what shows that its layout was read rightly."""

    name: str
    loss: float
    loss_with_gates_open: float | None
    loss_of_guessing: float

    @property
    def predicts(self) -> bool:
        """Whether the model is clearly better than guessing among its vocabulary."""
        return self.loss < 0.7 * self.loss_of_guessing

    @property
    def gates_fit(self) -> bool:
        """Whether the weights were trained for these gates: opening all of them should not help much."""
        return self.loss_with_gates_open is None or self.loss < self.loss_with_gates_open + 0.5

    def sentence(self) -> str:
        """The proof in words."""
        opened = "" if self.loss_with_gates_open is None else f", {self.loss_with_gates_open:.3f} with all gates open"
        measured = f"{self.name} loses {self.loss:.3f} nats a token{opened} (guessing: {self.loss_of_guessing:.3f})"
        if not self.predicts:
            return f"{measured}, so it was not read rightly; check n_heads, activation, vocabulary and tokenizer."
        if not self.gates_fit:
            return f"{measured}, so its gates are not those it was trained with; check gate_offset."
        return f"{measured}, as a language model should."

    def require(self) -> None:
        """Raise if the import does not predict text."""
        if not (self.predicts and self.gates_fit):
            raise GossamerError(self.sentence())


def prove_import(model: LoadedModel, text: str, *, length: int = 256) -> ImportProof:
    """Measure an imported model on text, with its gates as they are and with all of them open."""
    loss = model.loss_on(text, length=length)
    opened = None
    if model.is_sparse:
        every_edge = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        with tape(model.hf, replace=[ForceOpen(layer, every_edge) for layer in range(model.anatomy.n_layers)]):
            opened = model.loss_on(text, length=length)
    return ImportProof(model.name, loss, opened, math.log(model.hf.config.vocab_size))
