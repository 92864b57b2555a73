"""Our LLaMA under the names of Hugging Face's ``LlamaForCausalLM``, both ways.

Rotary positions pair the same features in both, so heads keep their order; only row-parallel weights are
transposed, as ours are ``[in, out]``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import Manifest
from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.checkpoint.weights import INDEX, Weight
from malleus_ds.models.llama import LlamaConfig
from malleus_ds.placement import PARAMETER, LogicalTensor

_TIED_EMBEDDING = "tied_modules.token_embedding.weight"
_BLOCK = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("attention.query.weight", "self_attn.q_proj.weight"),
    ("attention.key.weight", "self_attn.k_proj.weight"),
    ("attention.value.weight", "self_attn.v_proj.weight"),
    ("attention.output.weight", "self_attn.o_proj.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
    ("mlp.gate.weight", "mlp.gate_proj.weight"),
    ("mlp.up.weight", "mlp.up_proj.weight"),
    ("mlp.down.weight", "mlp.down_proj.weight"),
)
"""Of a block in the order of its module: our names and theirs."""
_TRANSPOSED = frozenset({"attention.output.weight", "mlp.down.weight"})


def _names(num_blocks: int, is_tied: bool) -> Iterator[tuple[str, str, bool]]:
    """Our name, their name, and whether the weight is transposed, of all weights in our order."""
    yield _TIED_EMBEDDING if is_tied else "0.weight", "model.embed_tokens.weight", False
    for block in range(num_blocks):
        for own, theirs in _BLOCK:
            yield f"{block + 1}.{own}", f"model.layers.{block}.{theirs}", own in _TRANSPOSED
    last = num_blocks + 1
    yield f"{last}.weight" if is_tied else f"{last}.norm.weight", "model.norm.weight", False
    if not is_tied:
        yield f"{last}.projection.weight", "lm_head.weight", False


def llama_weights(manifest: Manifest) -> list[Weight]:
    """The weights of a checkpoint of `malleus_ds.models.llama` under Hugging Face's names.

    Raises `CheckpointError` for another model.
    """
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    num_blocks = sum(name.endswith(".attention.query.weight") for name in by_name)
    names = list(_names(num_blocks, _TIED_EMBEDDING in by_name))
    strange = sorted(by_name.keys() ^ {own for own, *_ in names})
    if num_blocks == 0 or strange:
        raise CheckpointError(
            f"the model is not that of malleus_ds.models.llama: {len(strange)} tensors are unknown or "
            f"missing, such as {strange[:3]}: write it with its own names (format safetensors)"
        )
    return [Weight(by_name[own], theirs, is_transposed) for own, theirs, is_transposed in names]


def llama_shape(manifest: Manifest, num_heads: int, rope_base: float, norm_epsilon: float) -> LlamaConfig:
    """The shape of the model; what its tensors do not tell is given. Raises `CheckpointError`."""
    shapes = {weight.name: weight.tensor.shape for weight in llama_weights(manifest)}
    vocabulary_size, hidden_size = shapes["model.embed_tokens.weight"]
    kv_size = shapes["model.layers.0.self_attn.k_proj.weight"][0]
    head_dim = hidden_size // max(num_heads, 1)
    if num_heads < 1 or hidden_size % num_heads or kv_size % head_dim:
        raise CheckpointError(
            f"num_heads is {num_heads}: the model has {hidden_size} hidden units and {kv_size} of its keys, "
            f"which must be multiples of the size of a head: give the number that it was made with"
        )
    return LlamaConfig(
        vocabulary_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=shapes["model.layers.0.mlp.gate_proj.weight"][0],
        num_heads=num_heads,
        num_kv_heads=kv_size // head_dim,
        num_blocks=sum(name.endswith("q_proj.weight") for name in shapes),
        rope_base=rope_base,
        norm_epsilon=norm_epsilon,
        tie_embeddings="lm_head.weight" not in shapes,
    )


def llama_document(config: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    """Hugging Face's ``config.json``. max_positions: a hint for its readers; the model has no limit."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_llama_shape(directory: Path) -> LlamaConfig:
    """The shape in a ``config.json`` of Hugging Face's. Raises `CheckpointError` for what ours lacks."""
    path = directory / "config.json"
    data = _read_json(path)
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    fixed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, expected in fixed.items():
        if data.get(key, expected) not in (expected, None):
            raise CheckpointError(
                f"{path}: {key} is {data[key]!r}, but malleus_ds.models.llama has {expected!r}"
            )
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise CheckpointError(f"{path}: rotary positions are scaled ({rope}), which ours are not")
    try:
        config = LlamaConfig(
            vocabulary_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
            num_blocks=data["num_hidden_layers"],
            rope_base=float(rope.get("rope_theta", data.get("rope_theta", 10_000.0))),
            norm_epsilon=data.get("rms_norm_eps", 1e-6),
            tie_embeddings=data.get("tie_word_embeddings", False),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: lacks {error}, or it is of another type") from error
    if data.get("head_dim") not in (config.head_dim, None):
        raise CheckpointError(
            f"{path}: head_dim is {data['head_dim']}, but hidden_size / num_attention_heads is "
            f"{config.head_dim}"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: has no object")
    return data


def read_llama(directory: Path, dtype: torch.dtype | None = None) -> tuple[Manifest, Iterator[Content]]:
    """A checkpoint of ours, parameters only, from a directory of Hugging Face's.

    dtype: of the parameters (None: as they are); give the job's compute dtype. Returns a manifest without
    files and the elements, read when they are asked for. Raises `CheckpointError`.
    """
    config = read_llama_shape(directory)
    files = _files(directory)
    names = list(_names(config.num_blocks, config.tie_embeddings))
    missing = [theirs for _, theirs, _ in names if theirs not in files]
    if missing:
        raise CheckpointError(f"{directory}: lacks {len(missing)} tensors, such as {missing[:3]}")
    tensors = []
    with _Files(directory) as opened:
        for own, theirs, is_transposed in names:
            tensors.append(_logical(own, opened.get(files[theirs], theirs), is_transposed, config, dtype))
    manifest = Manifest(
        tensors=tuple(tensors),
        files=(),
        optimizer="",
        groups=(),
        lr_scheduler=None,
        loss_scaler=None,
        position=dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0),
        seeds={},
        plan={},
        client_state={},
        in_order=True,
    )
    return manifest, _contents(directory, files, names, dtype)


def _logical(
    name: str, tensor: Tensor, is_transposed: bool, config: LlamaConfig, dtype: torch.dtype | None
) -> LogicalTensor:
    dtype = dtype or tensor.dtype
    layers = (0, config.num_blocks + 2) if name == _TIED_EMBEDDING else (int(name.split(".")[0]),)
    shape = tuple(tensor.T.shape) if is_transposed else tuple(tensor.shape)
    kind = str(dtype).removeprefix("torch.")
    return LogicalTensor(name, shape, kind, dtype.itemsize, layers, group=None)


def _contents(
    directory: Path,
    files: Mapping[str, str],
    names: Collection[tuple[str, str, bool]],
    dtype: torch.dtype | None,
) -> Iterator[Content]:
    with _Files(directory) as opened:
        for own, theirs, is_transposed in names:
            tensor = opened.get(files[theirs], theirs)
            values = (tensor.T if is_transposed else tensor).to(dtype or tensor.dtype).reshape(-1)
            yield Content(Interval(PARAMETER, own, 0, prod(tensor.shape)), values)


def _files(directory: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (directory / INDEX).exists():
        files = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(file == Path(str(file)).name for file in files.values()):
            raise CheckpointError(f"{directory / INDEX}: weight_map must give the name of a file beside it")
        return files
    name = "model.safetensors"
    try:
        with safe_open(directory / name, framework="pt") as file:
            return dict.fromkeys(file.keys(), name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / name}: cannot be read ({error})") from error


class _Files(ExitStack):
    """Open safetensors files of a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._opened: dict[str, Any] = {}

    def get(self, file: str, name: str) -> Tensor:
        path = self._directory / file
        try:
            if file not in self._opened:
                self._opened[file] = self.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = self._opened[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        return tensor
