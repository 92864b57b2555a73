"""Checkpoints in the layout of DeepSpeed's own pipeline engine, read and written without an engine."""
