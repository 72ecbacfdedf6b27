"""Data sets of prompts as they are found: files, formats, and one checked form for all."""
