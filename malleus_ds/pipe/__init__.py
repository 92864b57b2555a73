"""The pipeline engine: grid, module, engine."""
