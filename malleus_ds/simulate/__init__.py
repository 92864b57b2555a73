"""Simulation of training steps: 1F1B of any plan, other systems for comparison, scenarios. No torch."""
