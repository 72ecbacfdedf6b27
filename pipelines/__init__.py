"""Compose: one verb per file, artefact in, artefact out."""
