"""ZeRO-1 over sync groups."""
