"""Moving training state between two plans: what must move (pure), and its execution."""
