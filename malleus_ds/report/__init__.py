"""What a run shows and writes: bars, tables, live progress."""
