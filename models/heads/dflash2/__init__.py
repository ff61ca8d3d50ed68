"""The DFlash2 head (z-lab, 2026): its config and its module."""
