"""The stages of a run, in order."""

STAGES = ("prepare", "generate", "capture", "train", "export", "evaluate")
