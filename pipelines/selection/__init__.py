"""Which of the usable prompts are taken: near duplicates, contamination, languages, the draw."""
