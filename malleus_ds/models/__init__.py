"""Models as lists of `deepspeed.pipe.LayerSpec`, and the loss that trains them at any TP degree."""

from malleus_ds.models.common import ModelConfigError
from malleus_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from malleus_ds.models.llama import LlamaConfig, llama_layers
from malleus_ds.tensor_parallel import VocabParallelLoss

__all__ = [
    "GPTConfig",
    "LlamaConfig",
    "ModelConfigError",
    "VocabParallelLoss",
    "gpt_layers",
    "gpt_loss",
    "llama_layers",
]
