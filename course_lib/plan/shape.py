"""What a model is made of: sizes, parameters and floating-point operations, and presets by the names people use."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from course_lib.plan.volumes import Impossible

_WHOLE = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class ModelShape:
    """A GPT: `layers` blocks of attention and a four times wider MLP with biases, learned positions, `length` tokens
    a row. `tied`: the embedding is the output matrix too. `gated` is the Llama family: three MLP matrices, no
    biases, rotary positions. `mlp`: the MLP's inner width (0: 4·width). `kv_heads`: heads of keys and values
    (0: as many as `heads`)."""

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    tied: bool = True
    mlp: int = 0
    gated: bool = False
    kv_heads: int = 0

    @property
    def inner(self) -> int:
        return self.mlp or 4 * self.width

    @property
    def kv_width(self) -> int:
        return self.width * (self.kv_heads or self.heads) // self.heads

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices: 12h² for a GPT."""
        h = self.width
        return 2 * h * h + 2 * h * self.kv_width + (3 if self.gated else 2) * h * self.inner

    @property
    def block_parameters(self) -> int:
        """The matrices, their biases and two norms: 12h² + 13h for a GPT; the Llama family has only the norms' weights
        beside the matrices."""
        small = 2 * self.width if self.gated else 7 * self.width + 2 * self.kv_width + self.inner
        return self.block_matrices + small

    @property
    def embedding_parameters(self) -> int:
        """Embedding, output matrix, positions and the last norm."""
        others = 1 if self.gated else self.length + 2
        return (self.vocab * (1 if self.tied else 2) + others) * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.embedding_parameters

    def stage_parameters(self, stages: int) -> int:
        """Of the fullest of `stages` pipeline stages: its layers and one end's embedding or output matrix."""
        elsewhere = self.vocab * self.width if stages > 1 and not self.tied else 0
        return self.layers // stages * self.block_parameters + self.embedding_parameters - elsewhere

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of one token: 6 a parameter and 12·L·h·s for attention, causal masking not discounted.
        An untied embedding is looked up, not multiplied, and counts no FLOPs. (arXiv 2204.02311, appendix B.)"""
        looked_up = 0 if self.tied else self.vocab * self.width
        return 6 * (self.parameters - looked_up) + 12 * self.layers * self.width * self.length


def _gpt(layers: int, width: int, heads: int, vocab: int = 50368) -> ModelShape:
    return ModelShape(layers, width, heads, vocab, 2048)


def _llama(layers: int, width: int, heads: int, mlp: int, *, vocab: int = 32000, length: int = 2048,
           kv_heads: int = 0) -> ModelShape:
    return ModelShape(layers, width, heads, vocab, length, tied=False, mlp=mlp, gated=True, kv_heads=kv_heads)


MODELS: dict[str, ModelShape] = {
    # GPT-style: the shapes of MosaicML's llm-foundry, and of Megatron-LM (arXiv 2104.04473, 2205.05198) from 22B on.
    "125M": _gpt(12, 768, 12), "350M": _gpt(24, 1024, 16), "760M": _gpt(24, 1536, 12), "1B": _gpt(24, 2048, 16),
    "3B": _gpt(32, 2560, 20), "7B": _gpt(32, 4096, 32), "13B": _gpt(40, 5120, 40), "22B": _gpt(48, 6144, 64, 51200),
    "30B": _gpt(48, 7168, 56), "70B": _gpt(80, 8192, 64), "175B": _gpt(96, 12288, 96, 51200),
    "530B": _gpt(105, 20480, 128, 51200), "1T": _gpt(128, 25600, 160, 51200),
    # arXiv 2302.13971, 2307.09288 and 2407.21783.
    "llama-7B": _llama(32, 4096, 32, 11008), "llama-13B": _llama(40, 5120, 40, 13824),
    "llama-65B": _llama(80, 8192, 64, 22016),
    "llama2-70B": _llama(80, 8192, 64, 28672, length=4096, kv_heads=8),
    "llama3-8B": _llama(32, 4096, 32, 14336, vocab=128256, length=8192, kv_heads=8),
    "llama3-70B": _llama(80, 8192, 64, 28672, vocab=128256, length=8192, kv_heads=8),
    "llama3-405B": _llama(126, 16384, 128, 53248, vocab=128256, length=8192, kv_heads=8),
}  # fmt: skip


def model(text: str, length: int | None = None) -> ModelShape:
    """A preset by name, or a free form such as `layers=32,width=4096,heads=32,vocab=50368` (also `mlp=`, `kv_heads=`,
    `gated=1`, `tied=0`), with rows of `length` tokens. Raises `Impossible` for what it does not know."""
    named = {name.lower(): shape for name, shape in MODELS.items()}
    if text.lower() in named:
        found = named[text.lower()]
    elif "=" in text:
        found = _free(text, length or 2048)
    else:
        raise Impossible(f"there is no model {text!r}: choose one of {', '.join(MODELS)}, or write "
                         "layers=32,width=4096,heads=32,vocab=50368")
    if length is not None and length < 1:
        raise Impossible(f"rows of {length} tokens hold nothing: give a length of 1 at least")
    return found if length is None else replace(found, length=length)


def _free(text: str, length: int) -> ModelShape:
    needed, known = ("layers", "width", "heads", "vocab"), ("mlp", "kv_heads", "gated", "tied")
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in needed + known or not _WHOLE.fullmatch(value):
            raise Impossible(f"cannot read {part.strip()[:40]!r}: write {', '.join(needed + known)} each as name=whole "
                             "number, as in layers=32,width=4096,heads=32,vocab=50368")
        if name in values:
            raise Impossible(f"{name} is given twice: once is enough")
        values[name] = int(value)
    missing = [name for name in needed if not values.get(name)]
    if missing:
        raise Impossible(f"a model needs {', '.join(missing)} as well, each 1 at least")
    switches = {name: bool(values[name]) for name in ("gated", "tied") if name in values}
    found = ModelShape(**{**values, **switches}, length=length)  # type: ignore[arg-type]
    if found.width % found.heads:
        raise Impossible(f"a width of {found.width} cannot be dealt to {found.heads} attention heads evenly")
    if found.heads % (found.kv_heads or found.heads):
        raise Impossible(f"{found.heads} heads cannot share {found.kv_heads} heads of keys and values evenly")
    return found
