"""Sphinx configuration."""

from __future__ import annotations

import malleus_ds

project = "malleus_ds"
author = "The malleus_ds authors"
release = malleus_ds.__version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
myst_heading_anchors = 3
