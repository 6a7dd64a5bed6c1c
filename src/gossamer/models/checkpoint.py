"""A model on disk: an ordinary transformers folder from which a gate cannot get lost.

Three things hold a gate in place. The config keeps its specification (`gossamer_gate`) and names the attention
function (`"attn_implementation": "gossamer"`), so that plain transformers without gossamer stops at an implementation
it does not know. Plain transformers with gossamer imported loads no gates, and the attention function refuses to run.
Our own loader puts the gates in, in float32, and checks every one of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gossamer.attention import (
    ATTENTION_NAME,
    GATE_KEY,
    Gate,
    GateConfig,
    attach_gates,
    gates_of,
    use_gossamer_attention,
)
from gossamer.errors import GossamerError
from gossamer.files import atomic_folder, read_json, write_json
from gossamer.models.anatomy import anatomy, family_of
from gossamer.models.doctor import check_seam
from gossamer.models.loaded import SAVED_IMPLEMENTATION_KEY, LoadedModel
from gossamer.models.weights import (
    build_model,
    first_line,
    quiet_transformers,
    read_pickle,
    read_safetensors,
    tensor_names,
    weight_files,
)

GATE_MARK = ".gate.offset_H"  # how a gate's weight is recognised in a file
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_OURS = (  # how the names of a model folder's files begin; a folder with others is not replaced
    *("config.json", "generation_config", "model", "pytorch_model", "tokenizer", "special_tokens_map", "added_tokens"),
    *("chat_template", "vocab", "merges", "README.md", "LICENSE"),
)


class LoadSettings(TypedDict, total=False):
    """What every way to load a model takes."""

    name: str | None
    dtype: torch.dtype | str | None
    device: str | torch.device
    tokenizer: PreTrainedTokenizerBase | None


def resolve_dtype(dtype: torch.dtype | str | None, device: str | torch.device) -> torch.dtype | str:
    """The precision to load in: as asked, else float32 on a CPU and the stored one ("auto") elsewhere."""
    if dtype is None:
        return torch.float32 if str(device) == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise GossamerError(f"dtype {dtype!r} is unknown; use float32, bfloat16, float16 or float64.")
    return found


def load_folder(
    folder: str | Path,
    *,
    name: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a transformers folder, dense or gated, and verify whatever gates it declares or contains."""
    folder = Path(folder)
    config = read_config(folder)
    files = weight_files(folder)
    gates, spec = _declared_gates(folder, config, files)
    hf = build_model(config, _weights_source(folder, files), resolve_dtype(dtype, device), ignore=GATE_MARK)
    if spec is not None:
        _put_gates(hf, spec, gates, folder)
    tokenizer = tokenizer or read_tokenizer(folder)
    return finish(hf, name=name or str(folder), source=str(folder), tokenizer=tokenizer, device=device)


def finish(
    hf: PreTrainedModel,
    *,
    name: str,
    source: str,
    layout: str = "transformers folder",
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device,
) -> LoadedModel:
    """The last steps of every way to load: device, attention function, evaluation mode and the doctor's check."""
    try:
        hf = hf.to(device)
    except (RuntimeError, AssertionError) as error:
        raise GossamerError(f"The device {str(device)!r} cannot be used here; load with device='cpu'.") from error
    parts = anatomy(hf)
    if not gates_of(hf):
        use_gossamer_attention(hf, parts.sites())
    hf.eval()
    check_seam(hf, parts)
    return LoadedModel(name, hf, parts, source=source, layout=layout, optional_tokenizer=tokenizer)


def read_config(folder: Path) -> PretrainedConfig:
    """The folder's config, its family checked before transformers is asked to make anything of it."""
    if not (folder / "config.json").is_file():
        raise GossamerError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    raw = read_json(folder / "config.json")
    if not isinstance(raw, dict):
        raise GossamerError(f"{folder / 'config.json'} is no model config; copy the folder again.")
    family_of(raw)
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # config classes validate with exceptions of many kinds
        raise GossamerError(f"{folder / 'config.json'} is not a valid config ({first_line(error)}).") from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None if it has no tokenizer files at all."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizer files fail in many ways, and each names another exception
        raise GossamerError(f"The tokenizer in {folder} could not be read ({first_line(error)}).") from error


def save_model(model: LoadedModel, folder: str | Path, *, dtype: torch.dtype | str | None = None) -> Path:
    """Write config, weights and tokenizer to `folder`, whole or not at all; gates are always written in float32."""
    folder = Path(folder)
    _refuse_other_folder(folder)
    if model.layout == "micro":
        raise GossamerError("The micro model is made by gossamer.models.micro and cannot be saved; save another model.")
    if hasattr(model.hf, "get_base_model"):
        raise GossamerError(f"{model.name} still has adapters around it; merge them (merge_and_unload) before saving.")
    state = _state_to_write(model.hf, None if dtype is None else resolve_dtype(dtype, "cpu"))
    with atomic_folder(folder) as temporary:
        with quiet_transformers():
            model.hf.save_pretrained(temporary, state_dict=state)
            if model.optional_tokenizer is not None:
                model.optional_tokenizer.save_pretrained(temporary)
        _mark_config(temporary / "config.json", model, state)
        _require_written(temporary, model)
    return folder


def _refuse_other_folder(folder: Path) -> None:
    if folder.is_file():
        raise GossamerError(f"{folder} is a file; give the name of a folder to write.")
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not child.name.startswith(_OURS):
            raise GossamerError(f"{folder} holds {child.name!r}, which saving would delete; choose a new folder.")


def _state_to_write(hf: PreTrainedModel, dtype: torch.dtype | str | None) -> dict[str, Tensor]:
    """The weights in `dtype`; gates as they are; tensors that share memory go on sharing it."""
    state: dict[str, Tensor] = hf.state_dict()
    if not isinstance(dtype, torch.dtype):
        return state
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not name.endswith(GATE_MARK):
            key = (tensor.data_ptr(), tensor.shape)
            cast.setdefault(key, tensor.detach().to(dtype))
            state[name] = cast[key]
    return state


def _mark_config(path: Path, model: LoadedModel, state: dict[str, Tensor]) -> None:
    config = read_json(path)
    dtypes = {tensor.dtype for name, tensor in state.items() if tensor.is_floating_point() and GATE_MARK not in name}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    config.pop(SAVED_IMPLEMENTATION_KEY, None)
    if model.is_sparse:
        assert config.get(GATE_KEY) == model.hf.config.gossamer_gate, "the gate's specification was not written"
        config[SAVED_IMPLEMENTATION_KEY] = ATTENTION_NAME
    write_json(path, config)


def _require_written(folder: Path, model: LoadedModel) -> None:
    written = {name for file in weight_files(folder) for name in tensor_names(file) if name.endswith(GATE_MARK)}
    assert written == set(_gates_by_name(model.hf)), "the folder's gates are not the model's"


def _gates_by_name(hf: torch.nn.Module) -> dict[str, Gate]:
    """Every gate, under the name its offsets have in a state dict."""
    names = {id(module): name for name, module in hf.named_modules()}
    assert all(set(gate.state_dict()) == {"offset_H"} for gate in gates_of(hf)), "a gate has weights that nobody saves"
    return {f"{names[id(gate)]}.offset_H": gate for gate in gates_of(hf)}


def _declared_gates(
    folder: Path, config: PretrainedConfig, files: list[Path]
) -> tuple[dict[str, Tensor], GateConfig | None]:
    """The gate tensors in the files and the specification in the config: both or neither, else something got lost."""
    raw = read_json(folder / "config.json")
    named = raw.get(SAVED_IMPLEMENTATION_KEY) == ATTENTION_NAME
    gates = _gate_tensors(files)
    if GATE_KEY not in raw:
        if gates or named:
            lost = f"config.json has lost its {GATE_KEY!r} entry" if gates else "no gate is described or stored"
            raise GossamerError(f"{folder} was a gated model but {lost}; take the folder as gossamer saved it.")
        return {}, None
    spec = GateConfig.from_dict(raw[GATE_KEY])
    if not gates:
        raise GossamerError(
            f"{folder} declares gates but holds none (a plain re-save drops them), so it would run as another model; "
            "take the folder as gossamer saved it."
        )
    if not named:
        warnings.warn(
            f"{folder} was saved without gossamer and no longer says which attention it needs, so plain transformers "
            "would run it without its gates; the gates are here and are used, save it again with gossamer.",
            UserWarning,
            stacklevel=3,
        )
    delattr(config, GATE_KEY)
    return gates, spec


def _gate_tensors(files: list[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in files:
        if path.suffix != ".safetensors":
            continue
        names = [name for name in tensor_names(path) if name.endswith(GATE_MARK)]
        found |= read_safetensors(path, names) if names else {}
    return found


def _weights_source(folder: Path, files: list[Path]) -> Path | dict[str, Any]:
    """Safetensors are left to transformers; pickles are read here, where nothing in them can run."""
    if files[0].suffix == ".safetensors":
        return folder
    state: dict[str, Any] = {}
    for path in files:
        state |= read_pickle(path)
    return state


def _put_gates(hf: PreTrainedModel, spec: GateConfig, stored: dict[str, Tensor], folder: Path) -> None:
    attach_gates(hf, anatomy(hf).sites(), spec)
    setattr(hf.config, SAVED_IMPLEMENTATION_KEY, ATTENTION_NAME)
    gates = _gates_by_name(hf)
    if absent := sorted(set(gates) ^ set(stored)):
        raise GossamerError(f"{folder} does not have the gates that its config describes: see {absent[0]!r}.")
    for name, gate in gates.items():
        offset_H = stored[name]
        if offset_H.shape != gate.offset_H.shape or offset_H.dtype != torch.float32 or not offset_H.isfinite().all():
            raise GossamerError(
                f"The gate {name!r} in {folder} is damaged (shape {tuple(offset_H.shape)}, {offset_H.dtype}, and every "
                "number must be finite); take the folder as gossamer saved it."
            )
        with torch.no_grad():
            gate.offset_H.copy_(offset_H)
