"""Jobs that survive the loss of ranks: `malleus-run`, what it starts, and how it decides. No torch."""
