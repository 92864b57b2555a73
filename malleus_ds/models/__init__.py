"""Models as lists of `deepspeed.pipe.LayerSpec`."""

from malleus_ds.models.gpt import GPTConfig, ModelConfigError, gpt_layers, gpt_loss

__all__ = ["GPTConfig", "ModelConfigError", "gpt_layers", "gpt_loss"]
