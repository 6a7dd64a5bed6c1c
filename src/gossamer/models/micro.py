"""A two-layer model with integer weights whose every answer can be worked out by hand.

It is a GPT-2 without norms, so it runs through the same attention function, tape and hooks as any other model. Its
attention counts in powers of two: the scale is ln 2, so a head that scores its keys n_1, n_2, ... weighs them as
2^n_1, 2^n_2, ... over their sum, and an offset of -ln 2 opens exactly the edges with n > 1.

The 24 numbers of the residual stream are five slots. Tokens are `<s>` a b c.

    T 0-3   which token this is                     P 4-7    which token came before
    M 8-11  the average of the tokens so far        O 12-15  the logits, read off as they are
    N 16-23 which position this is

    L0H0  scores the position before with 60, all others 0: copies T to P (position 0 sees only itself)
    L0H1  scores 0 everywhere: copies the average of T to M
    MLP 0 adds 1 to the logit of c where this token is a and the one before is b
    L1H0  scores 2 where the key's P is the query's T, else 0: copies 7 T to O, that is induction
    L1H1  scores its own position with 60: copies -4 M to O

Clean prompt `a b a` (read as `<s> a b a`), corrupt prompt `c b a`; answers at the last position, metric b - a.

Dense, clean. L1H0 weighs the keys (1, 1, 4, 1)/7 and writes <s> + 2a + 4b; L1H1 writes -(<s> + 2a + b); MLP 0 writes c.
    Logits <s> 0, a 0, b 3, c 1; metric 3.
Dense, corrupt. No P is a, so L1H0 weighs all four keys alike and writes 7/4 of each; L1H1 takes 1 of each off.
    Logits 3/4, 3/4, 3/4, 7/4; metric 0.
Gated (offset -ln 2), clean. Open are three edges of L0H0, one of L1H0 (query 3, key 2), four of L1H1: 8 of 40.
    L1H0 writes 7 * 4/7 b = 4b (its closed keys keep their 3/7), M is empty. Logits 0, 0, 4, 1; metric 4.
Gated, corrupt. L1H0 opens nothing and its row is zero. Logits 0, 0, 0, 1; metric 0.

One head's output patched from the clean into the corrupt run, metric and effect:
    dense  L0H0 3 (1)   L0H1 1 (1/3)   L1H0 2 (2/3)   L1H1 1 (1/3)
    gated  L0H0 4 (1)   L0H1 0 (0)     L1H0 4 (1)     L1H1 0 (0)
One edge of L1H0 shut in the dense, clean run, query 3: key 2 leaves b - a = -1, key 1 leaves 4.
"""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gossamer.attention import GateConfig
from gossamer.models.checkpoint import finish
from gossamer.models.loaded import LoadedModel, gate

VOCABULARY = ("<s>", "a", "b", "c")
CLEAN, CORRUPT = "a b a", "c b a"
OFFSET = -math.log(2)
LAYOUT = "micro"

_N_TOKENS, _N_POSITIONS, _WIDTH, _HEAD_WIDTH = 4, 8, 24, 12
_TOKEN, _BEFORE, _AVERAGE, _OUTPUT, _POSITION = 0, 4, 8, 12, 16


def micro(*, gated: bool = False, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """The micro model, dense or with the gates of its hand-worked answers."""
    hf = GPT2LMHeadModel(_config())
    for block in hf.transformer.h:
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
        block.attn.scaling = math.log(2)
    hf.transformer.ln_f = nn.Identity()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.zero_()
        _write_embeddings(hf)
        _write_first_block(hf.transformer.h[0])
        _write_second_block(hf.transformer.h[1])
    name = "micro/sparse" if gated else "micro/dense"
    model = finish(hf.to(dtype), name=name, source=LAYOUT, layout=LAYOUT, tokenizer=_tokenizer(), device="cpu")
    return gate(model, GateConfig("logit", OFFSET)) if gated else model


def _config() -> GPT2Config:
    return GPT2Config(
        vocab_size=_N_TOKENS,
        n_positions=_N_POSITIONS,
        n_embd=_WIDTH,
        n_layer=2,
        n_head=2,
        n_inner=1,
        activation_function="relu",
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def _write_embeddings(hf: GPT2LMHeadModel) -> None:
    _copy(hf.transformer.wte.weight, 0, _TOKEN, _N_TOKENS)
    _copy(hf.transformer.wpe.weight, 0, _POSITION, _N_POSITIONS)
    _copy(hf.lm_head.weight, 0, _OUTPUT, _N_TOKENS)


def _write_first_block(block: nn.Module) -> None:
    query_DE, key_DE, value_DE, write_ED = _head(block, 0)
    _copy(query_DE, _POSITION, 0, _N_POSITIONS, factor=60)
    _copy(key_DE, _POSITION, 1, _N_POSITIONS - 1)  # position j answers to a query from j + 1
    _copy(value_DE, _TOKEN, 0, _N_TOKENS)
    _copy(write_ED, 0, _BEFORE, _N_TOKENS)
    _, _, value_DE, write_ED = _head(block, 1)
    _copy(value_DE, _TOKEN, 0, _N_TOKENS)
    _copy(write_ED, 0, _AVERAGE, _N_TOKENS)
    a, b, c = (VOCABULARY.index(token) for token in "abc")
    block.mlp.c_fc.weight[[_TOKEN + a, _BEFORE + b], 0] = 1  # type: ignore[union-attr,operator]
    block.mlp.c_fc.bias[0] = -1  # type: ignore[union-attr,operator]
    block.mlp.c_proj.weight[0, _OUTPUT + c] = 1  # type: ignore[union-attr,operator]


def _write_second_block(block: nn.Module) -> None:
    query_DE, key_DE, value_DE, write_ED = _head(block, 0)
    _copy(query_DE, _TOKEN, 0, _N_TOKENS, factor=2)
    _copy(key_DE, _BEFORE, 0, _N_TOKENS)
    _copy(value_DE, _TOKEN, 0, _N_TOKENS)
    _copy(write_ED, 0, _OUTPUT, _N_TOKENS, factor=7)
    query_DE, key_DE, value_DE, write_ED = _head(block, 1)
    _copy(query_DE, _POSITION, 0, _N_POSITIONS, factor=60)
    _copy(key_DE, _POSITION, 0, _N_POSITIONS)
    _copy(value_DE, _AVERAGE, 0, _N_TOKENS)
    _copy(write_ED, 0, _OUTPUT, _N_TOKENS, factor=-4)


def _head(block: nn.Module, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of one head's query, key and value weights [D, E] and of its output weights [E, D]."""
    columns = slice(head * _HEAD_WIDTH, (head + 1) * _HEAD_WIDTH)
    parts: tuple[Tensor, ...] = block.attn.c_attn.weight.split(_WIDTH, dim=1)  # type: ignore[union-attr,operator]
    query_DE, key_DE, value_DE = (part[:, columns] for part in parts)
    return query_DE, key_DE, value_DE, block.attn.c_proj.weight[columns]  # type: ignore[union-attr,index]


def _copy(matrix: Tensor, row: int, column: int, count: int, *, factor: float = 1) -> None:
    """Write `factor` on a diagonal: input `row + i` goes to output `column + i`."""
    steps = torch.arange(count)
    matrix[row + steps, column + steps] = factor


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=VOCABULARY[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=VOCABULARY[0], unk_token=VOCABULARY[0])
