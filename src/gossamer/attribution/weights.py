"""What every attention edge contributes to a target, from gradients; needs no transcoder.

An edge (layer, head, query, key) carries its weight (softmax times gate) times the key's value vector. Its
contribution is that carried vector times the gradient of the target at the head's output, which is its weight times the
gradient in it:

    gradient    in the run as it is. What later layers make of the edge is taken to first order
    integrated  the gradient averaged while ALL weights of all layers grow together from zero (no attention anywhere) to
                their own values, patterns held. The contributions then sum to the target minus its value without any
                attention

Gates are constants: an edge that opens or shuts another one gets no credit for it. `Held` says what else is constant;
what is not is followed by the gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import ForceShut, Weights, tape
from gossamer.attention.edge_gradients import midpoints, record_patterns, weight_gradient
from gossamer.attribution.frozen import FrozenModel, freeze
from gossamer.attribution.held import Held, holding
from gossamer.attribution.hops import Floats
from gossamer.attribution.result import Ablation, Ints, Method, TokenAttribution
from gossamer.attribution.targets import Prompt, Target
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel

STEPS = 16
MOST_TOKENS = 4096  # in one forward of ablations
REAL = Held(patterns=False, norms=False, mlps=False)


def token_attribution(
    model: LoadedModel,
    prompt: Prompt,
    target: Target,
    *,
    method: Method = "gradient",
    held: Held | None = None,
    steps: int = STEPS,
    ablate: Held | None = None,
) -> TokenAttribution:
    """The contribution of every open edge of the prompt to the target.

    `ablate` also shuts every edge alone, exactly, with these parts held: `weights.REAL` for the model as it is, in
    which later patterns and gates are computed anew.
    """
    held = held or Held()
    if method == "integrated" and not held.patterns:
        raise GossamerError("Integrated gradients scale the patterns, so the patterns are held; use method 'gradient'.")
    if steps < 1:
        raise GossamerError(f"An integral needs at least one step, not {steps}.")
    model.hf.eval()
    frozen = freeze(model, prompt.ids_T(model))
    ids_BT = frozen.ids_Q[None]

    def metric() -> Tensor:
        return _value(model, ids_BT, target).sum()

    patterns = record_patterns(model.hf, metric)
    shares = midpoints(steps) if method == "integrated" else [1.0] if held.patterns else []
    with holding(frozen, held):
        gradient = weight_gradient(model.hf, metric, patterns.weights_LBHQK, shares)
    contribution_LHQK = (patterns.weights_LBHQK * gradient)[:, 0]
    open_LHQK = patterns.open_LBHQK[:, 0]
    layer_E, head_E, query_E, key_E = (index.cpu().numpy() for index in open_LHQK.nonzero(as_tuple=True))
    places = (layer_E, head_E, query_E, key_E)
    with torch.no_grad():
        logits_BV = _logits(model, ids_BT)
    return TokenAttribution(
        model=model.name,
        gated=model.is_sparse,
        n_layers=model.anatomy.n_layers,
        n_heads=model.anatomy.n_heads,
        prompt=prompt,
        target=target,
        value=float(target.of(logits_BV)[0]),
        probability=float(logits_BV.softmax(-1)[0, target.token]),
        method=method,
        held=held,
        layer_E=layer_E,
        head_E=head_E,
        query_E=query_E,
        key_E=key_E,
        weight_E=patterns.weights_LBHQK[:, 0][open_LHQK].double().cpu().numpy(),
        contribution_E=contribution_LHQK[open_LHQK].double().cpu().numpy(),
        lost_K=hop_ablation(frozen, target, open_LHQK.any((0, 1))[-1]),
        ablation=None if ablate is None else Ablation(ablate, edge_ablation(frozen, target, places, held=ablate)),
        provenance={"model": model.provenance(), "steps": steps if method == "integrated" else 1},
    )


@torch.no_grad()
def edge_ablation(frozen: FrozenModel, target: Target, edges: tuple[Ints, ...], *, held: Held) -> Floats:
    """What the target loses when each edge (layer, head, query, key) alone carries nothing, exactly."""
    model, n_tokens = frozen.model, frozen.n_positions
    layer_E = edges[0]
    lost_E = np.zeros(len(layer_E))
    step = max(1, MOST_TOKENS // n_tokens)
    with holding(frozen, held):
        whole = float(_value(model, frozen.ids_Q[None], target)[0])
        for layer in np.unique(layer_E):
            mine = np.flatnonzero(layer_E == layer)
            for some_E in (mine[first : first + step] for first in range(0, len(mine), step)):
                shut_RHQK = _one_each(frozen, [edge[some_E] for edge in edges[1:]])
                changes = _without(frozen, int(layer), shut_RHQK, held)
                with tape(model.hf, replace=changes):
                    value_R = _value(model, frozen.ids_Q.expand(len(some_E), -1), target)
                lost_E[some_E] = whole - value_R.double().cpu().numpy()
    return lost_E


@torch.no_grad()
def hop_ablation(frozen: FrozenModel, target: Target, open_K: Tensor) -> Floats:
    """What the target loses [K] when all heads' edges from one key to the last position are shut, exactly.

    Everything else is computed anew; keys from which no edge is open lose nothing and are not run.
    """
    model, n_tokens = frozen.model, frozen.n_positions
    whole = float(_value(model, frozen.ids_Q[None], target)[0])
    lost_K = np.zeros(n_tokens)
    places = open_K.nonzero()[:, 0]
    for key_R in places.split(max(1, MOST_TOKENS // n_tokens)) if len(places) else ():
        shut_RHQK = torch.zeros(len(key_R), model.anatomy.n_heads, n_tokens, n_tokens, dtype=torch.bool)
        shut_RHQK[torch.arange(len(key_R)), :, -1, key_R.cpu()] = True
        shut_RHQK = shut_RHQK.to(frozen.ids_Q.device)
        with tape(model.hf, replace=[ForceShut(layer, shut_RHQK) for layer in range(frozen.n_layers)]):
            value_R = _value(model, frozen.ids_Q.expand(len(key_R), -1), target)
        lost_K[key_R.cpu().numpy()] = whole - value_R.double().cpu().numpy()
    return lost_K


def _one_each(frozen: FrozenModel, places: list[Ints]) -> Tensor:
    """Row r marks the r-th edge only."""
    head_R, query_R, key_R = (torch.from_numpy(place) for place in places)
    shape = (len(head_R), frozen.model.anatomy.n_heads, frozen.n_positions, frozen.n_positions)
    shut_RHQK = torch.zeros(shape, dtype=torch.bool)
    shut_RHQK[torch.arange(len(head_R)), head_R, query_R, key_R] = True
    return shut_RHQK.to(frozen.ids_Q.device)


def _without(frozen: FrozenModel, layer: int, shut_RHQK: Tensor, held: Held) -> list[Weights] | list[ForceShut]:
    if not held.patterns:
        return [ForceShut(layer, shut_RHQK)]
    weights_L = [part.pattern_HQK[None] for part in frozen.layers]
    weights_L[layer] = weights_L[layer].masked_fill(shut_RHQK, 0)
    return [Weights(index, weights) for index, weights in enumerate(weights_L)]


def _logits(model: LoadedModel, ids_BT: Tensor) -> Tensor:
    logits_BV = model.hf(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))


def _value(model: LoadedModel, ids_BT: Tensor, target: Target) -> Tensor:
    return target.of(_logits(model, ids_BT))
