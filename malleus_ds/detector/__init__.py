"""Measures every device, estimates its straggling rate and tells all ranks."""
