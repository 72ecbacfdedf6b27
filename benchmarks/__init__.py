"""Measurements as ratios to a peer or a limit that was measured in the same run."""
