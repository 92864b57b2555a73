"""LLaMAs under Hugging Face's names: the same logits in `transformers`, and the same weights back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from malleus_ds.checkpoint import CheckpointError
from malleus_ds.checkpoint.huggingface import read_llama, read_llama_shape
from malleus_ds.checkpoint.importing import write_checkpoint
from malleus_ds.checkpoint.opening import open_path
from malleus_ds.checkpoint.weights import INDEX
from malleus_ds.cli.main import main
from malleus_ds.models import LlamaConfig
from malleus_ds.models.llama import llama_layers
from tests.checkpoints import stored_weights, write_own
from tests.distributed.reference import build_all

GROUPED = LlamaConfig(
    vocabulary_size=24,
    hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    num_blocks=2,
    rope_base=500.0,
    norm_epsilon=1e-4,
)
TIED = LlamaConfig(
    vocabulary_size=24,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    num_kv_heads=2,
    num_blocks=1,
    tie_embeddings=True,
)


def build(config: LlamaConfig) -> tuple[nn.Module, Any]:
    """The modules, and their logits. Weights are large enough for every part to matter."""
    modules, functions = build_all(llama_layers(config))
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.4)

    def logits(tokens: Tensor) -> Tensor:
        value = tokens
        for function in functions:
            value = function(value)
        return value

    return modules, logits


def export_arguments(config: LlamaConfig) -> list[str]:
    return [
        *("--format", "huggingface", "--num-heads", str(config.num_heads)),
        *("--rope-base", str(config.rope_base), "--norm-epsilon", str(config.norm_epsilon)),
    ]


@pytest.mark.parametrize("config", [GROUPED, TIED], ids=["grouped", "tied"])
def test_transformers_computes_the_same_logits(config: LlamaConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    modules, logits = build(config)
    write_own(modules, tmp_path / "ours", {"token_embedding": (0, config.num_blocks + 2)})
    out = tmp_path / "theirs"
    shards = [] if config.tie_embeddings else ["--shard-gb", "1e-5"]
    assert (
        main(["checkpoint", "export", str(tmp_path / "ours"), str(out), *export_arguments(config), *shards])
        == 0
    )
    assert (out / INDEX).exists() == bool(shards)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) > 1 and max(sizes) < 11_000 if shards else len(sizes) == 1
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(report.values())
    tokens = torch.randint(0, config.vocabulary_size, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits(tokens), rtol=1e-5, atol=1e-5)

    model.save_pretrained(tmp_path / "saved")  # as transformers writes it, not as we do
    assert read_llama_shape(tmp_path / "saved") == config
    back = write_checkpoint(tmp_path / "back", "here", *read_llama(tmp_path / "saved"), part_bytes=1000)
    assert len(list(back.glob("*.safetensors"))) > 1
    expected = {name: parameter.detach() for name, parameter in modules.named_parameters()}
    torch.testing.assert_close(stored_weights(back), expected, rtol=0, atol=0)
    opened = open_path(back)
    opened.check_share(0, 1)
    assert [t.shape for t in opened.manifest.tensors] == [
        expected[t.name].shape for t in opened.manifest.tensors
    ]


def test_what_is_not_our_llama_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules, _ = build(GROUPED)
    write_own(modules, tmp_path / "ours")
    ours, out = str(tmp_path / "ours"), str(tmp_path / "theirs")
    export = ["checkpoint", "export", ours, out, "--format", "huggingface"]
    assert main(export) == 2
    assert main([*export, "--num-heads", "5"]) == 2
    write_own(nn.ModuleDict({"0": nn.Linear(2, 2)}), tmp_path / "linear")
    assert main(["checkpoint", "export", str(tmp_path / "linear"), out, "--format", "huggingface"]) == 2
    assert main([*export, "--num-heads", "4", "--dtype", "bfloat16"]) == 0
    assert main([*export, "--num-heads", "4"]) == 2
    messages = [line for line in capsys.readouterr().err.splitlines() if line.startswith("malleus:")]
    for message, part in zip(
        messages, ("--num-heads is missing", "num_heads is 5", "3 tensors are unknown", "exists"), strict=True
    ):
        assert part in message
    assert {tensor.dtype for tensor in stored_weights(tmp_path / "theirs").values()} == {torch.bfloat16}

    path = tmp_path / "theirs/config.json"
    document = json.loads(path.read_text())
    for change, part in (
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "are scaled"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors"),
        ({"vocab_size": None}, "of another type"),
        ({"head_dim": 3}, "head_dim is 3"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(CheckpointError, match=part):
            read_llama(tmp_path / "theirs")
